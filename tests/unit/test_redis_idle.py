"""Idle connections: handed out again while they are quiet, and never after anything went wrong on them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from buffer_service.redis_idle import Connections


class Connection:
    """As much of redis-py's as is asked for."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock: socket.socket | None = sock

    def disconnect(self) -> None:
        self._sock = None


class Pool:
    """Makes connections whose other ends the test has."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.ends: list[socket.socket] = []
        self.released: list[Connection] = []

    def get_connection(self) -> Connection:
        ours, theirs = socket.socketpair()
        self._stack.enter_context(ours)
        self.ends.append(self._stack.enter_context(theirs))
        return Connection(ours)

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
