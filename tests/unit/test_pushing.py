"""What a push that has to wait says, and how often."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bapo.core.codec import pack_group
from bapo.core.errors import FullError
from bapo.runtime.logs import RateLimitedFilter
from bapo.transport import buffer_client
from bapo.transport.buffer_client import Pusher
from tests.support.factories import make_group


class Frames:
    """Where frames are written: how many times."""

    def __init__(self) -> None:
        self.written = 0

    def put(self, frames: Sequence[bytes]) -> list[str]:
        self.written += len(frames)
        return ["f" * 32] * len(frames)


def push_all(peer: Any, frames: Any, *, full_s: float, into: Frames | None = None) -> dict[str, str]:
    return Pusher(peer, into or Frames(), full_s=full_s).push(frames)  # type: ignore[arg-type]


class FullFirst:
    """A peer whose buffer takes every second push."""

    def __init__(self) -> None:
        self.pushes = 0

    def call(self, method: str, path: str, **_: Any) -> Any:
        if path == "/room":
            return None
        self.pushes += 1
        if self.pushes % 2:
            raise FullError("the buffer is full: 3 fresh groups queued")
        return SimpleNamespace(json=lambda: json.loads('{"groups": {"g": "stored"}, "room": true}'))


class Clock:
    """Stands where the module has `time`: seconds pass only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class RefusedByRedis:
    """A peer that has room whenever it is asked, because the batch lacks groups, and whose Redis takes none."""

    def __init__(self, clock: Clock, retry_after_s: float) -> None:
        self.clock, self.retry_after_s = clock, retry_after_s
        self.calls: list[tuple[str, float]] = []

    def call(self, method: str, path: str, **_: Any) -> Any:
        self.calls.append((path, self.clock.now - 100))
        assert len(self.calls) < 20, "it pushes again and again"
        if path == "/groups":
            error = FullError("Redis is full")
            error.retry_after_s = self.retry_after_s
            raise error


def test_groups_that_redis_refuses_though_there_is_room_are_sent_once_in_each_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(buffer_client, "time", clock)
    peer: Any = RefusedByRedis(clock, retry_after_s=2.5)
    frames = Frames()
    with pytest.raises(FullError):
        push_all(peer, [pack_group(make_group())], full_s=5.0, into=frames)
    assert peer.calls == [(path, at) for at in (0.0, 2.5, 5.0) for path in ("/room", "/groups")]
    assert frames.written == 1, "it waits there"


@pytest.mark.parametrize(("pause_s", "lines"), [(30.0, 1), (0.0, 3)])
def test_a_buffer_that_stays_full_is_said_once_in_a_while(
    pause_s: float, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(buffer_client, "time", Clock())
    monkeypatch.setattr(buffer_client, "_waiting", RateLimitedFilter(pause_s))
    peer: Any = FullFirst()
    with caplog.at_level(logging.WARNING, "bapo.transport.buffer_client"):
        results = [push_all(peer, [pack_group(make_group())], full_s=2.0) for _ in range(3)]
    assert results == [{"g": "stored"}] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "push is waiting: the buffer is full: 3 fresh groups queued"
    ] * lines
