"""Idle connections: handed out again while they are quiet, and never after anything went wrong on them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from redis.exceptions import ConnectionError, ResponseError

from buffer_service.redis_idle import Connections


class Connection:
    """As much of redis-py's as is asked for."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock: socket.socket | None = sock
        self.answer: bytes | Exception = b"# Server\r\nrun_id:7f3a\r\n"

    def send_command(self, *parts: str) -> None:
        assert parts == ("INFO", "server")

    def read_response(self) -> bytes:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def disconnect(self) -> None:
        self._sock = None


class Pool:
    """Makes connections whose other ends the test has."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.ends: list[socket.socket] = []
        self.released: list[Connection] = []
        self.answer: bytes | Exception | None = None

    def get_connection(self) -> Connection:
        ours, theirs = socket.socketpair()
        self._stack.enter_context(ours)
        self.ends.append(self._stack.enter_context(theirs))
        connection = Connection(ours)
        connection.answer = self.answer or connection.answer
        return connection

    def release(self, connection: Connection) -> None:
        self.released.append(connection)


@pytest.fixture
def pool() -> Iterator[Pool]:
    with ExitStack() as stack:
        yield Pool(stack)


def test_the_connection_that_came_back_last_is_taken_first(pool: Pool) -> None:
    connections = Connections(pool)  # type: ignore[arg-type]
    first, second = connections.take(), connections.take()
    connections.give_back(first)
    connections.give_back(second)
    assert connections.take() is second
    assert connections.take_idle() is first
    assert connections.take_idle() is None
    assert len(pool.ends) == 2


def test_a_connection_that_redis_has_closed_is_not_handed_out(pool: Pool) -> None:
    connections = Connections(pool)  # type: ignore[arg-type]
    held = connections.take()
    connections.give_back(held)
    pool.ends[0].close()
    assert connections.take_idle() is None
    assert pool.released == [held.connection]
    assert connections.take() is not held


def test_a_connection_on_which_something_is_unread_is_not_handed_out(pool: Pool) -> None:
    connections = Connections(pool)  # type: ignore[arg-type]
    connections.give_back(connections.take())
    pool.ends[0].send(b"+OK\r\n")
    assert connections.take_idle() is None


def test_a_dropped_connection_is_closed_and_left_to_the_pool(pool: Pool) -> None:
    connections = Connections(pool)  # type: ignore[arg-type]
    held = connections.take()
    connections.drop(held)
    assert held.connection._sock is None
    assert pool.released == [held.connection]
    assert connections.take_idle() is None


def test_a_connection_knows_the_process_at_its_other_end_if_redis_tells(pool: Pool) -> None:
    assert Connections(pool).take().server == "7f3a"  # type: ignore[arg-type]
    pool.answer = ResponseError("NOPERM this user has no permissions to run the 'info' command")
    assert Connections(pool).take().server == ""  # type: ignore[arg-type]


def test_a_connection_that_breaks_before_it_is_handed_out_is_left_to_the_pool(pool: Pool) -> None:
    pool.answer = ConnectionError("gone")
    with pytest.raises(ConnectionError, match="gone"):
        Connections(pool).take()  # type: ignore[arg-type]
    assert [connection._sock for connection in pool.released] == [None]
