"""Fixtures that several folders of tests share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis
from hypothesis import settings

from tests.redis_server import RedisServer
from tests.small_disk import NoMountError, mounted

# A busy machine is no failure: how long an example takes belongs in benchmarks.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


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
    try:
        with mounted(tmp_path / "disk") as folder:
            yield folder
    except NoMountError as error:
        pytest.skip(str(error))


LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count, by file, what is left out because it is long."""
    for item in items:
        if item.get_closest_marker("long"):
            item.config.stash.setdefault(LEFT_OUT, Counter())[item.nodeid.partition("::")[0]] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """A count of deselected tests would hide which ones nobody has run."""
    found = config.stash.get(LEFT_OUT, Counter())
    if not found or "long" in config.option.markexpr.replace("not long", ""):
        return
    terminalreporter.section("left out: long tests")
    for path, number in sorted(found.items()):
        terminalreporter.line(f"{number:4d}  python -m pytest -m long {path}")
