"""Requests: QUEUED -> LEASED -> DONE, in the order of their places, whatever happens to their workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import redis

from bapo.core.types import Purpose, RolloutRequest
from buffer_service.store.base import FORGET_AFTER_STEPS, Store
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.redis.keys import Keys
from tests.support.buffer import PuttingRedisStore as RedisStore
from tests.support.buffer import an_assembly, answer, incoming, stat, stored
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


def evaluations(label: str, *names: str, min_version: int = 1) -> list[RolloutRequest]:
    return [
        make_request(
            prompt_id=name, request_id=f"e-{name}", purpose=Purpose.EVALUATE, label=label, min_version=min_version
        )
        for name in names
    ]


def test_a_request_that_is_forgotten_is_not_asked_again_while_its_group_is_held(store: Store) -> None:
    a, b, c = stored(store, "abc")
    for step, name in enumerate("ab", 1):
        group, before = f"g-{name}", store.tables()
        made = an_assembly(step=step, fresh=[group], trained=[group], before=before, high=[stat("g-a")])
        assert store.commit_assembly(made)
    store.commit(1 + FORGET_AFTER_STEPS, 1 + FORGET_AFTER_STEPS)
    assert store.frames(["g-b"]) == [None]
    assert store.enqueue([a, b, c], cursor=None) == 1, "b alone: B_high holds a, and c is a fresh group"
    assert ids(store.claim("w", limit=9, policy_version=1)) == ["g-b"]


def test_a_round_waits_for_what_was_asked_before_it_and_ends_with_its_last_answer(store: Store) -> None:
    early, leased, settled, due = reevaluations(5, "early", "leased", "settled", "due")
    store.enqueue([leased, settled, early, *reevaluations(6, "other")], cursor=None)
    assert ids(store.claim("w", limit=1, policy_version=5)) == ["r5-leased"]
    store.push([incoming(answer(settled, version=5))])
    assert store.enqueue_round(5, [early, settled, due]) == 1, "asking twice asks once"
    assert store.readiness(5).round_left == 3
    for request, left in ((early, 2), (due, 1), (early, 1), (leased, 0), (settled, 0)):
        store.push([incoming(answer(request, version=5))])
        assert store.readiness(5).round_left == left


def test_a_reevaluation_that_comes_after_its_round_is_one_more_to_wait_for(store: Store) -> None:
    own, late = reevaluations(5, "own", "late")
    store.enqueue_round(5, [own])
    assert store.enqueue([late, own, *reevaluations(6, "other"), *fresh("f", step=5)], cursor=None) == 3
    assert store.status().reevaluation_rounds == {5: 2}
    store.push([incoming(answer(request, version=5)) for request in (own, late)])
    assert store.readiness(5).round_left == 0


def test_a_lease_that_is_over_returns_to_its_place(timed: TimedStore) -> None:
    store = timed.store
    store.enqueue(fresh("a", "b", "c"), cursor=None)
    assert ids(store.claim("slow", limit=1, policy_version=1)) == ["g-a"]
    timed.clock.move(60)
    assert ids(store.claim("w", limit=3, policy_version=1)) == ["g-a", "g-b", "g-c"]


def test_a_status_shows_no_lease_that_is_over(timed: TimedStore) -> None:
    store = timed.store
    store.enqueue(fresh("a"), cursor=None)
    store.claim("dead", limit=1, policy_version=1)
    timed.clock.move(60)
    status = store.status()
    assert (status.leased["fresh"], status.queued["fresh"], status.workers["dead"].leased) == (0, 1, 0)


def test_a_returned_request_tells_how_often_it_was_handed_out(timed: TimedStore) -> None:
    store = timed.store
    store.enqueue(fresh("a"), cursor=None)
    assert store.claim("w", limit=1, policy_version=1)[0].attempts == 0
    timed.clock.move(60)
    assert store.claim("w", limit=1, policy_version=1)[0].attempts == 1


def test_a_failed_group_is_asked_again_until_its_last_attempt(make_store: Callable[..., Store]) -> None:
    store = make_store(max_attempts=2)
    store.enqueue(fresh("a", "b"), cursor=2)
    store.claim("w", limit=1, policy_version=1)
    assert store.fail("w", "g-a", reason="engine", detail="cuda") == "requeued"
    assert ids(store.claim("w", limit=1, policy_version=1)) == ["g-a"]
    assert store.fail("w", "g-a", reason="verifier", detail="hung") == "dropped"
    assert ids(store.claim("w", limit=9, policy_version=1)) == ["g-b"]
    status = store.status()
    assert (status.fresh_dropped, status.failures_in_a_row, status.last_failure) == (1, 2, "verifier: hung")
    assert store.counters()["failed_groups:engine"] == 1
    assert store.counters()["dropped_requests:verifier"] == 1


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


def test_a_dropped_reevaluation_and_a_dropped_evaluation_are_settled(make_store: Callable[..., Store]) -> None:
    store = make_store(max_attempts=1)
    store.enqueue_round(5, reevaluations(5, "p"))
    store.enqueue(evaluations("cd@5", "e"), cursor=None)
    for request in store.claim("w", limit=2, policy_version=5):
        store.fail("w", request.request_id, reason="engine", detail="")
    status = store.status()
    assert status.reevaluation_rounds == {5: 0}
    assert status.evaluations == {"cd@5": 1}
    assert status.fresh_dropped == 0


def test_a_forgotten_evaluation_can_be_asked_again_also_after_drops(make_store: Callable[..., Store]) -> None:
    store = make_store(max_attempts=1)
    done, dropped, leased, queued = requests = evaluations("cd@1", "a", "b", "c", "d")
    other = evaluations("other", "x")
    store.enqueue([*requests, *other], cursor=None)
    store.claim("w", limit=3, policy_version=1)
    store.push([incoming(answer(done))])
    store.fail("w", dropped.request_id, reason="engine", detail="")
    assert store.evaluated("cd@1") == ["e-a", "e-b"]
    store.forget("cd@1")
    assert store.status().evaluations == {}
    assert store.evaluated("cd@1") == []
    assert store.frames(["e-a"]) == [None]
    assert store.push([incoming(answer(leased))]) == ["unknown"]
    assert store.enqueue(requests, cursor=None) == 4
    assert ids(store.claim("w", limit=9, policy_version=1)) == ["e-x", "e-a", "e-b", "e-c", "e-d"]
    assert queued.label == "cd@1"


def test_forgetting_an_evaluation_leaves_other_requests_that_carry_its_label(store: Store) -> None:
    labelled = [make_request(prompt_id="f", label="cd@1"), replace(*reevaluations(1, "p"), label="cd@1")]
    store.enqueue([*labelled, *evaluations("cd@1", "e")], cursor=None)
    store.forget("cd@1")
    assert store.status().queued == {"fresh": 1, "reevaluate": 1, "evaluate": 0}
    assert store.push([incoming(answer(request)) for request in labelled]) == ["stored", "stored"]


def test_whatever_a_worker_says_is_a_sign_of_life(timed: TimedStore) -> None:
    store = timed.store
    calls: list[Callable[[], object]] = [
        lambda: store.claim("w", limit=1, policy_version=1),
        lambda: store.renew("w", ["g-a"]),
        lambda: store.fail("w", "g-z", reason="engine", detail=""),
        lambda: store.push([incoming(answer(make_request(prompt_id="a"), worker_id="w"))]),
    ]
    store.enqueue(fresh("a"), cursor=None)
    store.claim("w", limit=1, policy_version=0)
    for call in calls:
        timed.clock.move(1000)
        assert store.status().workers["w"].silent_s >= 1000
        call()
        assert store.status().workers["w"].silent_s < 1000


def test_what_was_not_asked_of_anybody_is_no_sign_of_life(store: Store) -> None:
    """Names cost nothing: those of pushes that store nothing are not kept."""
    store.enqueue(fresh("a"), cursor=None)
    never, again = make_request(prompt_id="never"), make_request(prompt_id="a")
    store.push([incoming(answer(never, worker_id="x")), incoming(answer(again, version=0, worker_id="y"))])
    store.push([incoming(answer(again, worker_id="w"))])
    assert store.push([incoming(answer(again, worker_id="z"))]) == ["duplicate"]
    assert set(store.status().workers) == {"w"}


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


def known(store: Store) -> int:
    """Workers that the store remembers, whether a status shows them or not."""
    assert isinstance(store, RedisStore)
    return int(store._link.client.zcard(store._keys["heard"]))
