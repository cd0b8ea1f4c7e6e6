"""Every store, so that each contract test runs on each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from buffer_service.store import Store
from tests.buffer_setup import STORES, new_store


@pytest.fixture(params=STORES)
def make_store(request: pytest.FixtureRequest) -> Callable[..., Store]:
    """Make a store of each kind: `make_store(run=..., lease_s=..., max_attempts=...)`."""
    url = request.getfixturevalue("redis_url") if request.param == "redis" else ""
    return partial(new_store, request.param, url)


@pytest.fixture
def store(make_store: Callable[..., Store]) -> Store:
    """An empty store of each kind."""
    return make_store()
