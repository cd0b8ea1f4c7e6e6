"""Connections to a real Redis: how many there may be, and which process of it has answered."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bapo.core.errors import UnavailableError
from bapo.transport.buffer_client import BufferClient
from buffer_service.store.redis.connection import ANSWER_TIMEOUT_S, CONNECT_TIMEOUT_S, RedisLink
from buffer_service.store.redis.durability import AofState
from tests.support.redis_server import RedisServer


def test_what_was_not_written_before_redis_was_started_again_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process has answered; the look behind it must not be answered by the second one, which has nothing
    unwritten."""
    server = RedisServer(tmp_path, aof=True).start()

    def restarted(first: AofState, look: Callable[[], AofState], where: str) -> None:
        server.kill()
        server.start()
        look()

    try:
        link = RedisLink(server.url)
        monkeypatch.setattr("buffer_service.store.redis.connection.until_written", restarted)
        with pytest.raises(UnavailableError, match="does not answer"):
            link.at_once(("SET", "a", "1"), written=True)
        monkeypatch.undo()
        assert link.at_once(("SET", "a", "1"), ("GET", "a"), written=True)[1] == b"1"
    finally:
        server.stop()


def test_callers_hear_that_redis_hangs_before_they_give_the_service_up() -> None:
    """A call that is given up first says that the buffer service does not answer, and where it would be started."""
    patience_s = inspect.signature(BufferClient).parameters["timeout_s"].default
    assert patience_s > CONNECT_TIMEOUT_S + ANSWER_TIMEOUT_S


def test_a_redis_that_takes_connections_and_says_nothing_is_given_up_as_soon_as_one_that_takes_none(
    tmp_path: Path,
) -> None:
    """The kernel goes on taking connections for a process that stands still."""
    server = RedisServer(tmp_path).start()
    try:
        link = RedisLink(server.url)
        with server.stopped():
            begun = time.monotonic()
            with pytest.raises(UnavailableError, match="does not answer: Timeout reading from socket"):
                link.at_once(("PING",))
            assert CONNECT_TIMEOUT_S <= time.monotonic() - begun < ANSWER_TIMEOUT_S / 2
        assert link.at_once(("PING",)) == [b"PONG"]
        with link.client.client() as one:
            one.ping()
            assert one.connection._sock.gettimeout() == ANSWER_TIMEOUT_S, "only the beginning is in a hurry"
    finally:
        server.stop()
