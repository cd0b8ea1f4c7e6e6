"""Every store, so that each contract test runs on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from buffer_service.memory_store import MemoryStore
from buffer_service.redis_link import RedisLink
from buffer_service.redis_store import RedisStore
from buffer_service.store import Store

MakeStore = Callable[..., Store]
STORES = ("memory", "redis")


@pytest.fixture(params=STORES)
def make_store(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    """Make a store of each kind: `make_store(lease_s=..., max_attempts=..., run=...)`."""
    if request.param == "memory":
        yield lambda run="test", lease_s=60.0, max_attempts=3: MemoryStore(
            run, lease_s=lease_s, max_attempts=max_attempts
        )
        return
    link = RedisLink(request.getfixturevalue("redis_url"))
    yield lambda run="test", lease_s=60.0, max_attempts=3: RedisStore(
        link, run, lease_s=lease_s, max_attempts=max_attempts
    )
    link.client.close()


@pytest.fixture
def store(make_store: MakeStore) -> Store:
    """An empty store of each kind."""
    return make_store()
