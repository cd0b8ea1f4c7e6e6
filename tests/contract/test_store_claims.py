"""Claims that come twice, in every store: the same nonce is the same claim."""

from __future__ import annotations

from collections.abc import Callable

import redis

from bapo.core.types import RolloutRequest
from buffer_service.store.base import Store
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.redis.keys import Keys
from tests.support.buffer import PuttingRedisStore as RedisStore
from tests.support.buffer import answer, incoming
from tests.support.factories import make_request


def claimed(store: Store, nonce: str, *, limit: int = 2, worker: str = "w") -> list[str]:
    found = store.claim(worker, limit=limit, policy_version=1, nonce=nonce)
    return [request.request_id for request in found]


def asked(store: Store, names: str) -> list[RolloutRequest]:
    requests = [make_request(prompt_id=name) for name in names]
    store.enqueue(requests, cursor=None)
    return requests


def test_a_claim_that_comes_again_gets_what_it_had_and_nothing_new(store: Store) -> None:
    asked(store, "abcd")
    assert claimed(store, "me-1") == ["g-a", "g-b"]
    assert claimed(store, "me-1") == ["g-a", "g-b"]
    assert claimed(store, "me-1", limit=9) == ["g-a", "g-b"]
    assert store.status().leased["fresh"] == 2
    assert claimed(store, "me-2") == ["g-c", "g-d"], "another nonce is another claim"


def test_a_claim_that_leased_nothing_may_lease_when_it_comes_again(store: Store) -> None:
    assert claimed(store, "me-1") == []
    asked(store, "a")
    assert claimed(store, "me-1") == ["g-a"]


def test_only_what_the_worker_still_holds_comes_again(store: Store) -> None:
    first, *_ = asked(store, "abcd")
    assert claimed(store, "me-1", limit=3) == ["g-a", "g-b", "g-c"]
    store.push([incoming(answer(first))])
    store.fail("w", "g-b", reason="engine", detail="")
    assert claimed(store, "other-1", worker="v", limit=1) == ["g-b"]
    assert claimed(store, "me-1", limit=3) == ["g-c"]


def test_a_claim_that_a_newer_one_has_overtaken_gets_nothing(store: Store) -> None:
    asked(store, "abcd")
    assert claimed(store, "me-9", limit=1) == ["g-a"]
    assert claimed(store, "me-10", limit=1) == ["g-b"]
    assert claimed(store, "me-9") == []
    assert claimed(store, "me-10") == ["g-b"], "the newest is still known"


def test_another_client_under_the_same_name_neither_gets_nor_ends_the_leases_of_the_first(store: Store) -> None:
    asked(store, "abc")
    assert claimed(store, "before-7", limit=1) == ["g-a"]
    assert claimed(store, "after-1", limit=1) == ["g-b"]
    assert store.renew("w", ["g-a", "g-b"]) == ["g-a", "g-b"]


def test_a_claim_is_forgotten_with_its_leases(make_store: Callable[..., Store]) -> None:
    for end in (lambda store: store.release("w"), lambda store: store.resume(0)):
        store = make_store(run=f"end-{id(end)}")
        asked(store, "ab")
        claimed(store, "me-1", limit=1)
        end(store)
        assert claimed(store, "me-1") == ["g-a", "g-b"]


def test_a_restored_store_remembers_no_claim(store: Store) -> None:
    asked(store, "ab")
    claimed(store, "me-1", limit=1)
    store.restore(store.image(), [])
    assert claimed(store, "me-1") == ["g-a", "g-b"]


def test_a_request_whose_content_is_missing_is_left_out_of_a_claim(redis_store: RedisStore, redis_url: str) -> None:
    asked(redis_store, "abc")
    with redis.Redis.from_url(redis_url) as client:
        client.hdel(Keys("test")["requests"], "g-b")
    assert claimed(redis_store, "me-1", limit=3) == ["g-a", "g-c"]
    assert claimed(redis_store, "me-1", limit=3) == ["g-a", "g-c"]


def test_a_lease_in_redis_ends_by_the_clock_of_redis_in_milliseconds(redis_url: str) -> None:
    """Also for another version of this service, which may take over while requests are leased."""
    store = RedisStore(RedisLink(redis_url), "run", lease_s=60, max_attempts=3)
    asked(store, "a")
    with redis.Redis.from_url(redis_url) as client:
        before, _ = client.time()
        claimed(store, "me-1")
        after, _ = client.time()
        ends_ms = client.zscore(Keys("run")["leases_fresh"], "g-a")
    assert ends_ms is not None
    assert (before + 60) * 1000 <= ends_ms <= (after + 61) * 1000
