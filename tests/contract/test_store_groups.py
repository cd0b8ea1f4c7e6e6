"""Groups: stored once, acknowledged when they are there, deleted when nothing refers to them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bapo.core.errors import ContractError
from bapo.core.types import Purpose, RolloutRequest
from buffer_service.state import Tables
from tests.support.buffer import PuttingRedisStore as RedisStore
from tests.support.buffer import an_assembly, answer, incoming, new_store, stat, stored
from tests.support.factories import make_request
from tests.support.store_clock import TimedStore


def asked(store: RedisStore, *names: str, **fields: object) -> list[RolloutRequest]:
    requests = [make_request(prompt_id=name, **fields) for name in names]  # type: ignore[arg-type]
    store.enqueue(requests, cursor=None)
    return requests


def test_a_pushed_group_is_there_as_it_was_sent(store: RedisStore) -> None:
    (request,) = asked(store, "a")
    group = incoming(answer(request))
    assert store.push([group]) == ["stored"]
    assert store.frames(["g-a", "g-b"]) == [bytes(group.frame), None]
    assert store.records(["g-b", "g-a"]) == [None, group.record]


def test_two_contents_of_one_lease_store_nothing(store: RedisStore) -> None:
    """The other one differs in its tokens alone; what is pushed with it is not stored either, and may come again."""
    a, b = asked(store, "a", "b")
    first = answer(a, worker_id="w" * 40)  # a length that msgpack writes in another way
    store.push([incoming(first)])
    other = incoming(replace(first, token_ids=first.token_ids + 1))
    for groups in ([other], [incoming(answer(b)), other], [other, incoming(answer(b))]):
        with pytest.raises(ContractError, match="g-a is already stored with different content, from the same lease"):
            store.push(groups)
    assert (store.readiness(1).num_fresh, store.counters()) == (1, {"pushed_groups:stored": 1})
    assert store.push([incoming(answer(b)), incoming(first)]) == ["stored", "duplicate"]


def test_a_group_that_is_pushed_while_its_evaluation_is_forgotten_goes_too(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between looking which groups there are and deleting them."""
    store = new_store(redis_url)
    assert isinstance(store, RedisStore)
    requests = asked(store, "a", "b", "c", purpose=Purpose.EVALUATE, label="cd@1")
    store.push([incoming(answer(requests[0]))])
    look, counted = store.evaluated, []

    def look_slowly(label: str) -> list[str]:
        found = look(label)
        counted.append(dict(store.status().evaluations))
        store.push([incoming(answer(requests[1]))])  # and again, the second time
        return found

    monkeypatch.setattr(store, "evaluated", look_slowly)
    store.forget("cd@1")
    assert counted == [{"cd@1": 1}, {"cd@1": 1}]  # what is there, also in between
    assert (look("cd@1"), store.records(["g-a", "g-b"]), store.frames(["g-a", "g-b"])) == ([], [None] * 2, [None] * 2)
    status = store.status()
    assert (status.evaluations, status.num_bytes, status.queued["evaluate"]) == ({}, 0, 0)
    assert store.counters() == {"pushed_groups:stored": 2, "pushed_groups:duplicate": 1}


def test_a_group_that_nobody_asked_for_is_refused_and_counted(store: RedisStore) -> None:
    assert store.push([incoming(answer(make_request(prompt_id="x")))]) == ["unknown"]
    assert store.frames(["g-x"]) == [None]
    assert store.counters()["pushed_groups:unknown"] == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"group_size": 4}, "expected group_size 8, got 4"),
        ({"step": 2}, "expected step 1, got 2"),
        ({"purpose": Purpose.EVALUATE}, "expected purpose fresh, got evaluate"),
        ({"prompt_id": "b", "request_id": "g-a"}, "expected prompt a, got b"),
        ({"label": "cd@1"}, "expected label none, got cd@1"),
    ],
)
def test_a_group_that_answers_something_else_stores_nothing(
    store: RedisStore, wrong: dict[str, object], said: str
) -> None:
    right, _ = asked(store, "right", "a")
    other = make_request(**{"prompt_id": "a", **wrong})  # type: ignore[arg-type]
    rewards = "1" * other.group_size
    with pytest.raises(ContractError, match=f"g-a does not match its request: {said}$"):
        store.push([incoming(answer(right)), incoming(answer(other, rewards))])
    assert store.frames(["g-right", "g-a"]) == [None, None]
    assert store.status().queued["fresh"] == 2


def test_a_group_of_older_weights_than_admitted_is_asked_for_again(store: RedisStore) -> None:
    (request,) = asked(store, "a", min_version=5)
    store.claim("w", limit=1, policy_version=5)
    assert store.push([incoming(answer(request, version=4))]) == ["stale"]
    assert store.frames(["g-a"]) == [None]
    assert store.status().leased["fresh"] == 0
    assert store.claim("w", limit=1, policy_version=5) == [request]
    assert store.push([incoming(answer(request, version=5))]) == ["stored"]


def test_a_late_group_counts_even_when_its_lease_is_over(timed: TimedStore) -> None:
    store = timed.store
    (request,) = asked(store, "a")
    store.claim("slow", limit=1, policy_version=1)
    timed.clock.move(60)
    assert len(store.claim("other", limit=1, policy_version=1)) == 1
    assert store.push([incoming(answer(request, "10000000", worker_id="slow"))]) == ["stored"]
    assert store.push([incoming(answer(request, "11000000", worker_id="other"))]) == ["duplicate"]
    assert store.status().leased["fresh"] == 0
    assert store.claim("other", limit=1, policy_version=1) == []


def test_a_push_hears_of_the_worker(store: RedisStore) -> None:
    (request,) = asked(store, "a")
    store.push([incoming(answer(request, worker_id="w9"))])
    assert store.status().workers["w9"].leased == 0


def test_a_trained_group_lives_until_a_checkpoint_after_its_batch(store: RedisStore) -> None:
    stored(store, "a")
    store.commit_assembly(an_assembly(fresh=["g-a"], trained=["g-a"]))
    store.commit(1, 0)
    assert store.frames(["g-a"])[0] is not None
    store.commit(1, 1)
    assert store.frames(["g-a"]) == [None]
    assert store.status().num_bytes == 0


def test_a_group_in_b_high_outlives_its_batch_until_it_leaves(store: RedisStore) -> None:
    stored(store, "ab")
    one = Tables(step=1, high=(stat("g-a"),))
    store.commit_assembly(an_assembly(fresh=["g-a"], trained=["g-a"], high=one.high))
    store.commit(1, 1)
    assert store.frames(["g-a"])[0] is not None
    store.commit_assembly(an_assembly(step=2, fresh=["g-b"], trained=["g-b"], before=one))
    assert store.frames(["g-a"]) == [None]


def test_a_settled_request_is_forgotten_long_after_its_checkpoint(store: RedisStore) -> None:
    stored(store, "a")
    before = Tables()
    for step in range(1, 23):
        assembly = an_assembly(step=step, fresh=["g-a"] if step == 1 else [], before=before)
        assert store.commit_assembly(assembly)
        before = assembly.after
        store.commit(step, step)
        expected = "duplicate" if step <= 20 else "unknown"
        assert store.push([incoming(answer(make_request(prompt_id="a")))]) == [expected], step


def test_pushing_twice_stores_once_and_keeps_the_first(store: RedisStore) -> None:
    (request,) = asked(store, "a")
    first = incoming(answer(request, "10000000"))
    second = incoming(answer(request, "11111111", worker_id="of-a-later-lease"))
    assert store.push([first]) == ["stored"]
    assert store.push([second]) == ["duplicate"]
    assert store.push([first]) == ["duplicate"]
    assert store.frames(["g-a"]) == [bytes(first.frame)]
    assert store.readiness(1).num_fresh == 1


def test_a_group_that_no_batch_trains_is_deleted(store: RedisStore) -> None:
    stored(store, "ab")
    assert store.commit_assembly(an_assembly(fresh=["g-a", "g-b"], trained=["g-a"]))
    assert [frame is not None for frame in store.frames(["g-a", "g-b"])] == [True, False]
    assert store.records(["g-b"]) == [None]


def test_the_bytes_of_held_groups_are_counted(store: RedisStore) -> None:
    requests = asked(store, "a", "b")
    groups = [incoming(answer(request)) for request in requests]
    store.push(groups)
    assert store.status().num_bytes == len(groups[0].frame) + len(groups[1].frame)
    store.commit_assembly(an_assembly(fresh=["g-a"], trained=[]))
    assert store.status().num_bytes == len(groups[1].frame)
