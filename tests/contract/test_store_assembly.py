"""Assembly, commit and resume: all or nothing, once per step, replayable from a checkpoint."""

from __future__ import annotations

import threading

import pytest

from bapo.core.errors import ContractError
from buffer_service.state import Tables
from buffer_service.store.redis.store import RedisStore
from tests.support.buffer import an_assembly, stored
from tests.support.factories import make_request


def test_one_of_many_concurrent_assemblies_of_a_step_wins(store: RedisStore) -> None:
    stored(store, "abcd")
    won: list[bool] = []
    barrier = threading.Barrier(4)

    def assemble(name: str) -> None:
        barrier.wait()
        won.append(store.commit_assembly(an_assembly(fresh=[f"g-{name}"], trained=[f"g-{name}"])))

    threads = [threading.Thread(target=assemble, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False, False, False, True]
    assert store.status().fresh_ready == 3
    batch = store.batch(1)
    assert batch is not None
    assert len(batch.group_ids) == 1


# -- commit and resume


def three_steps(store: RedisStore) -> None:
    before = Tables()
    for step, name in enumerate("abc", start=1):
        stored(store, name, step=step)
        assembly = an_assembly(step=step, fresh=[f"g-{name}"], trained=[f"g-{name}"], before=before)
        assert store.commit_assembly(assembly)
        before = assembly.after


def test_a_resumed_learner_gets_the_same_batches_again(store: RedisStore) -> None:
    three_steps(store)
    store.commit(1, 1)
    store.commit(2, 1)
    before = [store.batch(2), store.batch(3)]
    store.resume(1)
    assert [store.batch(2), store.batch(3)] == before
    assert [frame is not None for frame in store.frames(["g-b", "g-c"])] == [True, True]
    status = store.status()
    assert (status.committed_step, status.checkpointed_step, status.assembled_step) == (1, 1, 3)


@pytest.mark.parametrize(("committed", "resumed", "missing"), [(2, 1, 2), (0, 5, 4)])
def test_a_resume_without_its_batches_says_to_restore_the_snapshot(
    store: RedisStore, committed: int, resumed: int, missing: int
) -> None:
    three_steps(store)
    store.commit(3, committed)
    store.enqueue([make_request(prompt_id="x")], cursor=None)
    store.claim("w", limit=1, policy_version=1)
    with pytest.raises(ContractError, match=f"batch {missing} "):
        store.resume(resumed)
    assert store.status().leased["fresh"] == 1
