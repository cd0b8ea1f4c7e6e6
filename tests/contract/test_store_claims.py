"""Claims that come twice, in every store: the same nonce is the same claim."""

from __future__ import annotations

import redis

from bapo.core.types import RolloutRequest
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.redis.keys import Keys
from tests.support.buffer import PuttingRedisStore as RedisStore
from tests.support.factories import make_request


def claimed(store: RedisStore, nonce: str, *, limit: int = 2, worker: str = "w") -> list[str]:
    found = store.claim(worker, limit=limit, policy_version=1, nonce=nonce)
    return [request.request_id for request in found]


def asked(store: RedisStore, names: str) -> list[RolloutRequest]:
    requests = [make_request(prompt_id=name) for name in names]
    store.enqueue(requests, cursor=None)
    return requests


def test_a_claim_that_comes_again_gets_what_it_had_and_nothing_new(store: RedisStore) -> None:
    asked(store, "abcd")
    assert claimed(store, "me-1") == ["g-a", "g-b"]
    assert claimed(store, "me-1") == ["g-a", "g-b"]
    assert claimed(store, "me-1", limit=9) == ["g-a", "g-b"]
    assert store.status().leased["fresh"] == 2
    assert claimed(store, "me-2") == ["g-c", "g-d"], "another nonce is another claim"


def test_another_client_under_the_same_name_neither_gets_nor_ends_the_leases_of_the_first(store: RedisStore) -> None:
    asked(store, "abc")
    assert claimed(store, "before-7", limit=1) == ["g-a"]
    assert claimed(store, "after-1", limit=1) == ["g-b"]
    assert store.renew("w", ["g-a", "g-b"]) == ["g-a", "g-b"]


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
