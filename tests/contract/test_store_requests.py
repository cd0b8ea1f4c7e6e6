"""Requests: QUEUED -> LEASED -> DONE, in the order of their places, whatever happens to their workers."""

from __future__ import annotations

import redis

from bapo.core.types import Purpose, RolloutRequest
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.redis.keys import Keys
from tests.support.buffer import PuttingRedisStore as RedisStore
from tests.support.buffer import answer, incoming
from tests.support.factories import make_request
from tests.support.store_clock import TimedStore


def ids(requests: list[RolloutRequest]) -> list[str]:
    return [request.request_id for request in requests]


def fresh(*names: str, min_version: int = 1, step: int = 1) -> list[RolloutRequest]:
    return [make_request(prompt_id=name, min_version=min_version, step=step) for name in names]


def reevaluations(step: int, *names: str) -> list[RolloutRequest]:
    return [
        make_request(
            prompt_id=name, request_id=f"r{step}-{name}", purpose=Purpose.REEVALUATE, step=step, min_version=step
        )
        for name in names
    ]


def test_a_round_waits_for_what_was_asked_before_it_and_ends_with_its_last_answer(store: RedisStore) -> None:
    early, leased, settled, due = reevaluations(5, "early", "leased", "settled", "due")
    store.enqueue([leased, settled, early, *reevaluations(6, "other")], cursor=None)
    assert ids(store.claim("w", limit=1, policy_version=5)) == ["r5-leased"]
    store.push([incoming(answer(settled, version=5))])
    assert store.enqueue_round(5, [early, settled, due]) == 1, "asking twice asks once"
    assert store.readiness(5).round_left == 3
    for request, left in ((early, 2), (due, 1), (early, 1), (leased, 0), (settled, 0)):
        store.push([incoming(answer(request, version=5))])
        assert store.readiness(5).round_left == left


def test_requests_that_were_planned_before_a_restore_do_not_move_the_cursor_past_those_it_undid(redis_url: str) -> None:
    """Otherwise the two between were never requested, and the learner waited for their step for ever."""
    store = RedisStore(RedisLink(redis_url), "run", lease_s=60, max_attempts=3)
    assert store.enqueue(fresh("a", "b"), cursor=2) == 2
    assert store.enqueue(fresh("e", "f"), cursor=6) == 0
    assert (store.status().cursor, store.status().num_open(Purpose.FRESH)) == (2, 2)
    assert store.enqueue(fresh("c", "d"), cursor=4) == 2
    assert store.enqueue(fresh("c", "d", "e", "f"), cursor=6) == 2


def test_nothing_is_kept_in_redis_of_the_attempts_of_a_request_that_is_answered(redis_url: str) -> None:
    store = RedisStore(RedisLink(redis_url), "run", lease_s=60, max_attempts=3)
    (request,) = fresh("a")
    store.enqueue([request], cursor=None)
    attempts = Keys("run")["attempts"]
    with redis.Redis.from_url(redis_url) as client:
        store.claim("w", limit=1, policy_version=1)
        store.fail("w", "g-a", reason="engine", detail="")
        assert client.hgetall(attempts) == {b"g-a": b"1"}
        store.push([incoming(answer(request))])
        assert client.hgetall(attempts) == {}


def test_workers_that_hold_nothing_and_are_silent_for_an_hour_are_forgotten(timed: TimedStore) -> None:
    store = timed.store
    store.enqueue(fresh("a", "b"), cursor=None)
    (mine,) = store.claim("claimer", limit=1, policy_version=1, nonce="c-1")
    store.push([incoming(answer(mine, worker_id="claimer"))])
    for number in range(20):
        store.claim(f"gone-{number}", limit=1, policy_version=0)
    timed.clock.move(3500)
    store.claim("w", limit=1, policy_version=0)
    assert known(store) == 22
    timed.clock.move(100)
    sizes = []
    for _ in range(4):
        store.renew("w", [])
        sizes.append(known(store))
    assert sizes == [14, 6, 1, 1]  # a few at each call, so that no call takes long
    # The claim of the one that is forgotten is forgotten, too: its nonce is a new one.
    assert [r.request_id for r in store.claim("claimer", limit=1, policy_version=1, nonce="c-1")] == ["g-b"]


def test_a_worker_that_holds_leases_is_not_forgotten(timed: TimedStore) -> None:
    store = timed.store
    store.enqueue(fresh("a"), cursor=None)
    store.claim("holder", limit=1, policy_version=1, nonce="c-1")
    timed.clock.move(4000)
    store.renew("w", [])  # which looks at no lease
    assert known(store) == 2
    store.claim("w", limit=1, policy_version=0)  # which ends leases that are over
    assert known(store) == 1


def known(store: RedisStore) -> int:
    """Workers that the store remembers, whether a status shows them or not."""
    assert isinstance(store, RedisStore)
    return int(store._link.client.zcard(store._keys["heard"]))
