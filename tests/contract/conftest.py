"""Stores on the session's Redis."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from buffer_service.store.base import Store
from buffer_service.store.redis.connection import RedisLink
from tests.support.buffer import PuttingRedisStore as RedisStore
from tests.support.buffer import new_store
from tests.support.store_clock import ShiftedClock, TimedStore


@pytest.fixture
def make_store(redis_url: str) -> Callable[..., Store]:
    """Make a store: `make_store(run=..., lease_s=..., max_attempts=...)`."""
    return partial(new_store, redis_url)


@pytest.fixture
def store(make_store: Callable[..., Store]) -> Store:
    """An empty store."""
    return make_store()


@pytest.fixture
def redis_store(redis_url: str) -> RedisStore:
    """An empty store, for what is not in the protocol."""
    store = new_store(redis_url, max_attempts=1000)
    assert isinstance(store, RedisStore)
    return store


@pytest.fixture
def timed(redis_url: str) -> TimedStore:
    """An empty store in which time passes when the test says so."""
    link = RedisLink(redis_url)
    return TimedStore(RedisStore(link, "test", lease_s=60.0, max_attempts=3), ShiftedClock(link, "test"))
