"""Assembly, commit and resume: all or nothing, once per step, replayable from a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from bapo.core.errors import ContractError
from bapo.core.types import Progress, Purpose
from buffer_service.state import Replacement, Tables
from buffer_service.store.redis.store import RedisStore
from tests.support.buffer import an_assembly, answer, hard, incoming, stat, stored, view_of
from tests.support.factories import make_prompt, make_request


def test_a_store_in_step_order_puts_the_planned_step_above_the_arrival(make_store: Callable[..., RedisStore]) -> None:
    store = make_store(in_step_order=True)
    requests = [make_request(prompt_id=name, step=step) for name, step in (("a", 2), ("b", 1), ("c", 2), ("d", 1))]
    store.enqueue(requests, cursor=None)
    store.push([incoming(answer(request)) for request in requests])
    order = [record.group_id for record in view_of(store, 9).fresh]
    assert order == ["g-b", "g-d", "g-a", "g-c"]
    image = store.image()
    store.restore(image, [(group_id, store.frames([group_id])[0] or b"") for group_id in order])
    assert store.image() == image
    late = make_request(prompt_id="late", step=1)
    store.enqueue([late], cursor=None)
    store.push([incoming(answer(late))])
    assert [record.group_id for record in view_of(store, 3).fresh] == ["g-b", "g-d", "g-late"]


def test_an_assembly_changes_everything_at_once(store: RedisStore) -> None:
    stored(store, "abc")
    assembly = an_assembly(
        fresh=["g-a", "g-b"],
        trained=["g-b"],
        bad=[hard("a")],
        high=[stat("g-b")],
        new_prompts=[make_prompt(prompt_id="a")],
    )
    assert store.commit_assembly(assembly)
    assert store.tables() == assembly.after
    assert store.batch(1) == assembly.batch
    assert [record.group_id for record in view_of(store, 9).fresh] == ["g-c"]
    status = store.status()
    assert (status.assembled_step, status.fresh_ready, status.num_bad, status.num_high) == (1, 1, 1, 1)
    assert (status.r_tot, status.facts) == (0.25, {"c2": 0.2, "c3": 0.3})
    assert status.batches == [{"step": 1, "x1": 1, "x2": 0, "x3": 0, "batch_size": 4}]


@pytest.mark.parametrize(
    ("step", "fresh", "why"),
    [(2, ["g-a"], "not the next step"), (1, ["g-a", "g-z"], "a group is not there"), (0, ["g-a"], "the past")],
)
def test_a_broken_fence_changes_nothing(store: RedisStore, step: int, fresh: list[str], why: str) -> None:
    stored(store, "a")
    assert not store.commit_assembly(an_assembly(step=step, fresh=fresh, trained=["g-a"])), why
    assert store.status().assembled_step == 0
    assert store.status().fresh_ready == 1
    assert store.batch(step) is None
    assert store.frames(["g-a"])[0] is not None


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


def test_groups_that_are_too_old_are_dropped_counted_and_asked_again_at_the_head(store: RedisStore) -> None:
    old = stored(store, "ab", rewards="11000000")
    store.enqueue([make_request(prompt_id="waits", min_version=5)], cursor=None)
    again = [make_request(prompt_id=r.prompt.prompt_id, request_id=f"{r.request_id}~1", min_version=5) for r in old]
    results = [record.result(None, "stale", 9) for record in view_of(store, 2).fresh]
    replacements = [Replacement(result=f, request=r) for f, r in zip(results, again, strict=True)]
    store.replace_stale(replacements)
    store.replace_stale(replacements)
    assert view_of(store, 9).stale == (results[0], results[1])
    assert store.frames(["g-a", "g-b"]) == [None, None]
    assert store.counters()["dropped_groups:stale:2/8"] == 2
    assert store.claim("w", limit=9, policy_version=4) == []
    claimed = store.claim("w", limit=9, policy_version=5)
    assert [request.request_id for request in claimed] == ["g-a~1", "g-b~1", "g-waits"]
    assert claimed[0] == again[0]


def test_a_stale_group_stays_when_the_id_of_its_replacement_is_taken(store: RedisStore) -> None:
    """Of an open request, and of one that is done: dropping the group would lose its prompt."""
    stored(store, ["a", "b", "c"])
    store.enqueue([make_request(prompt_id="x", request_id="g-a~1", min_version=9)], cursor=None)
    stored(store, ["b~1"])
    results = [record.result(None, "stale", 9) for record in view_of(store, 3).fresh]
    items = [Replacement(result=f, request=make_request(request_id=f"{f.group_id}~1", min_version=5)) for f in results]
    assert sorted(store.replace_stale(items)) == ["g-a", "g-b"]
    assert [record.group_id for record in view_of(store, 9).fresh] == ["g-a", "g-b", "g-b~1"]
    assert [result.group_id for result in view_of(store, 9).stale] == ["g-c"]
    assert [request.request_id for request in store.claim("w", limit=9, policy_version=5)] == ["g-c~1"]


def test_groups_that_a_batch_did_not_train_are_held_until_the_batch_is_released(store: RedisStore) -> None:
    stored(store, "abc")
    assembly = an_assembly(fresh=["g-a", "g-b", "g-c"], trained=["g-a"], untrained=["g-b"])
    assert store.commit_assembly(assembly)
    assert [frame is not None for frame in store.frames(["g-a", "g-b", "g-c"])] == [True, True, False]
    assert store.batch(1) == assembly.batch
    store.commit(1, checkpointed=1)
    assert store.frames(["g-a", "g-b"]) == [None, None]
    assert store.status().num_bytes == 0


def test_stale_groups_that_are_held_stay_until_the_assembly_that_reports_them(store: RedisStore) -> None:
    old = stored(store, "ab")
    results = [record.result(None, "stale", 1) for record in view_of(store, 2).fresh]
    again = [make_request(request_id=f"{request.request_id}~1") for request in old]
    store.replace_stale([Replacement(result=f, request=r) for f, r in zip(results, again, strict=True)], hold=True)
    assert view_of(store, 9).fresh == ()
    assert None not in store.frames(["g-a", "g-b"])
    assert store.commit_assembly(an_assembly(num_stale=2, stale=["g-a", "g-b"], untrained=["g-b"]))
    assert [frame is not None for frame in store.frames(["g-a", "g-b"])] == [False, True]
    store.commit(1, checkpointed=1)
    assert store.frames(["g-b"]) == [None]


# -- commit and resume


def three_steps(store: RedisStore) -> None:
    before = Tables()
    for step, name in enumerate("abc", start=1):
        stored(store, name, step=step)
        assembly = an_assembly(step=step, fresh=[f"g-{name}"], trained=[f"g-{name}"], before=before)
        assert store.commit_assembly(assembly)
        before = assembly.after


def test_a_commit_releases_the_batches_up_to_the_checkpoint(store: RedisStore) -> None:
    three_steps(store)
    store.commit(3, 2)
    assert [store.batch(step) is not None for step in (1, 2, 3)] == [False, False, True]
    status = store.status()
    assert (status.committed_step, status.checkpointed_step) == (3, 2)


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


def test_a_resume_returns_all_leases_and_sets_progress_back(make_store: Callable[..., RedisStore]) -> None:
    store = make_store(max_attempts=1)
    three_steps(store)
    store.enqueue([make_request(prompt_id=name) for name in "xyz"], cursor=None)
    store.claim("w1", limit=1, policy_version=1)
    store.claim("w2", limit=1, policy_version=1)
    store.fail("w2", "g-y", reason="engine", detail="")
    store.report(Progress(step=4, policy_version=3))
    store.resume(2)
    assert store.progress() == Progress(step=2, policy_version=2)
    assert store.status().leased["fresh"] == 0
    assert store.status().failures_in_a_row == 0
    claimed = store.claim("w3", limit=9, policy_version=1)
    assert [(request.request_id, request.attempts) for request in claimed] == [("g-x", 0), ("g-z", 0)]
    store.report(Progress(step=3, policy_version=2))
    assert store.progress().step == 3


@pytest.mark.parametrize(("committed", "resumed", "missing"), [(2, 1, 2), (0, 5, 4)])
def test_a_resume_without_its_batches_says_to_restore_the_snapshot(
    store: RedisStore, committed: int, resumed: int, missing: int
) -> None:
    three_steps(store)
    store.commit(3, committed)
    store.enqueue([make_request(prompt_id="x")], cursor=None)
    store.claim("w", limit=1, policy_version=1)
    with pytest.raises(ContractError, match=f"batch {missing} is not in the buffer; restore the snapshot"):
        store.resume(resumed)
    assert store.status().leased["fresh"] == 1


def test_a_resume_before_the_first_checkpoint_starts_over(store: RedisStore) -> None:
    three_steps(store)
    store.report(Progress(step=3, policy_version=2))
    store.resume(0)
    assert store.progress() == Progress(step=0, policy_version=0)
    assert store.batch(1) is not None


def test_a_scheduler_that_starts_again_behind_a_checkpoint_does_not_issue_its_round_twice(store: RedisStore) -> None:
    first = [make_request(prompt_id="p", request_id="r-0", purpose=Purpose.REEVALUATE, step=2)]
    more = [*first, make_request(prompt_id="q", request_id="r-1", purpose=Purpose.REEVALUATE, step=2)]
    for step in (1, 2, 3):
        store.commit_assembly(an_assembly(step=step))
    store.enqueue_round(2, first)
    store.commit(3, 3)
    assert store.enqueue_round(2, more) == 0
    assert store.status().queued["reevaluate"] == 1
    store.enqueue_round(4, [])
    store.commit_assembly(an_assembly(step=4))
    store.commit(4, 4)
    assert store.status().reevaluation_rounds == {4: 0}


def test_a_reevaluated_group_is_consumed_once(store: RedisStore) -> None:
    request = make_request(prompt_id="p", request_id="r5-p", purpose=Purpose.REEVALUATE, step=5)
    store.enqueue_round(5, [request])
    store.push([incoming(answer(request))])
    assert store.commit_assembly(an_assembly(reevaluated=["r5-p"]))
    assert not store.commit_assembly(an_assembly(step=2, reevaluated=["r5-p"]))
    assert store.status().reevaluated_ready == 0
    assert store.frames(["r5-p"]) == [None]


def test_rounds_are_remembered_back_to_the_checkpoint(store: RedisStore) -> None:
    three_steps(store)
    for step in (1, 2, 3):
        store.enqueue_round(step, [])
    store.commit(3, 2)
    assert store.status().reevaluation_rounds == {2: 0, 3: 0}


def test_commits_only_rise(store: RedisStore) -> None:
    three_steps(store)
    store.commit(3, 2)
    store.commit(1, 1)
    status = store.status()
    assert (status.committed_step, status.checkpointed_step) == (3, 2)
