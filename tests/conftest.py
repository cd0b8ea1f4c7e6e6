"""Fixtures that several folders of tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.redis_server import RedisServer
from tests.small_disk import mounted


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One real server for the whole session; use `redis_url` unless a test needs the process."""
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of a real server without any keys."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder whose disk is soon full."""
    with mounted(tmp_path / "disk") as folder:
        yield folder
