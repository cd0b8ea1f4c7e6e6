"""What a launcher says of a buffer service that does not answer: whether it is the service that hangs, or its Redis."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo.config.load import dump_toml
from bapo.core.errors import UnavailableError
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.messages import BufferStatus
from buffer_service.state import Health
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.redis.store import RedisStore
from services.launcher.display.snapshot import Observer
from tests.support.buffer_app import serving, small_config

CONFIG = small_config(run={"name": "r"})
SAID = "Redis at redis://r:6379 does not respond: Timeout reading from socket"


class Hanging(RedisStore):
    """A store that hangs until the test ends, but for who wants to know whether it does."""

    def __init__(self, redis_url: str) -> None:
        super().__init__(RedisLink(redis_url), "r", lease_s=60, max_attempts=3)
        self.hangs, self.ends = False, threading.Event()

    def status(self) -> BufferStatus:
        if self.hangs:
            self.ends.wait(60)
        return super().status()

    def health(self) -> Health:
        if self.hangs:
            raise UnavailableError(SAID)
        return super().health()


@pytest.fixture
def store(redis_url: str) -> Iterator[Hanging]:
    found = Hanging(redis_url)
    yield found
    found.ends.set()


def test_it_is_redis_that_hangs(store: Hanging, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", dump_toml(CONFIG))
    with serving(store, CONFIG) as client:
        observer = Observer(CONFIG, run)
        observer.watch(buffer_url=client.url)
        assert observer.poll().silence == observer.silence_reason() == ""
        store.hangs = True
        observer._asked_s = float("-inf")
        assert "timed out" in observer.poll().silence
        assert observer.silence_reason() == SAID
        store.ends.set()
