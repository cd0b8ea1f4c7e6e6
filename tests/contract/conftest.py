"""Every store, so that each contract test runs on each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from buffer_service.redis_link import RedisLink
from buffer_service.store import Store
from tests.buffer_setup import STORES, new_store
from tests.buffer_setup import PuttingMemoryStore as MemoryStore
from tests.buffer_setup import PuttingRedisStore as RedisStore
from tests.store_clock import ShiftedClock, TimedStore


@pytest.fixture(params=STORES)
def make_store(request: pytest.FixtureRequest) -> Callable[..., Store]:
    """Make a store of each kind: `make_store(run=..., lease_s=..., max_attempts=...)`."""
    url = request.getfixturevalue("redis_url") if request.param == "redis" else ""
    return partial(new_store, request.param, url)


@pytest.fixture
def store(make_store: Callable[..., Store]) -> Store:
    """An empty store of each kind."""
    return make_store()


@pytest.fixture
def redis_store(redis_url: str) -> RedisStore:
    """An empty store in Redis, for what only that has."""
    store = new_store("redis", redis_url, max_attempts=1000)
    assert isinstance(store, RedisStore)
    return store


@pytest.fixture(params=STORES)
def timed(request: pytest.FixtureRequest) -> TimedStore:
    """An empty store of each kind, in which time passes when the test says so."""
    options: dict[str, Any] = {"lease_s": 60.0, "max_attempts": 3}
    if request.param == "memory":
        clock = ShiftedClock(None, "test")
        return TimedStore(MemoryStore("test", now=lambda: clock.seconds, **options), clock)
    link = RedisLink(request.getfixturevalue("redis_url"))
    return TimedStore(RedisStore(link, "test", **options), ShiftedClock(link, "test"))
