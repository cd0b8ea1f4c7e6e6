"""Groups: stored once, acknowledged when they are there, deleted when nothing refers to them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bapo.core.errors import ContractError
from bapo.core.types import Purpose, RolloutRequest
from tests.support.buffer import PuttingRedisStore as RedisStore
from tests.support.buffer import answer, incoming, new_store
from tests.support.factories import make_request


def asked(store: RedisStore, *names: str, **fields: object) -> list[RolloutRequest]:
    requests = [make_request(prompt_id=name, **fields) for name in names]  # type: ignore[arg-type]
    store.enqueue(requests, cursor=None)
    return requests


def test_two_contents_of_one_lease_store_nothing(store: RedisStore) -> None:
    """The other one differs in its tokens alone; what is pushed with it is not stored either, and may come again."""
    a, b = asked(store, "a", "b")
    first = answer(a, worker_id="w" * 40)  # a length that msgpack writes in another way
    store.push([incoming(first)])
    other = incoming(replace(first, token_ids=first.token_ids + 1))
    for groups in ([other], [incoming(answer(b)), other], [other, incoming(answer(b))]):
        with pytest.raises(ContractError, match="different content"):
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


def test_pushing_twice_stores_once_and_keeps_the_first(store: RedisStore) -> None:
    (request,) = asked(store, "a")
    first = incoming(answer(request, "10000000"))
    second = incoming(answer(request, "11111111", worker_id="of-a-later-lease"))
    assert store.push([first]) == ["stored"]
    assert store.push([second]) == ["duplicate"]
    assert store.push([first]) == ["duplicate"]
    assert store.frames(["g-a"]) == [bytes(first.frame)]
    assert store.readiness(1).num_fresh == 1
