"""Idle connections to one Redis. redis-py's pool makes and mends them; handing one out costs it 30 us, here it is 2."""

from __future__ import annotations

import re
import select
import socket
from collections import deque
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import ResponseError

SEND_BUFFER_BYTES = 1 << 20
"""Of a socket, as far as the machine allows it: what fits is sent without waiting for Redis to take the first part."""

_RUN_ID = re.compile(rb"run_id:(\w+)")


@dataclass(frozen=True, slots=True)
class Held:
    """A connection that one thread has to itself."""

    connection: Any
    """Of redis-py."""
    poller: select.poll
    """Of its socket."""
    server: str
    """The process of Redis at the other end (`run_id` of INFO); empty where Redis does not tell."""

    @property
    def has_news(self) -> bool:
        """Something came while nothing was asked: the end, most likely."""
        return bool(self.poller.poll(0))


class Connections:
    """Of one pool, the newest first. Thread-safe."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self._pool = pool
        self._idle: deque[Held] = deque()

    def take_idle(self) -> Held | None:
        """One that is connected and quiet, if there is one. Does not block."""
        while True:
            try:
                held = self._idle.pop()
            except IndexError:
                return None
            if held.connection._sock is not None and not held.has_news:
                return held
            self.drop(held)

    def take(self) -> Held:
        """One that is connected. Raises: RedisError."""
        return self.take_idle() or self._made()

    def _made(self) -> Held:
        connection: Any = self._pool.get_connection()
        try:
            server = _server_of(connection)
        except BaseException:
            connection.disconnect()
            self._pool.release(connection)
            raise
        connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        poller = select.poll()
        poller.register(connection._sock, select.POLLIN)
        return Held(connection, poller, server)

    def give_back(self, held: Held) -> None:
        """All that was asked on it has been answered."""
        self._idle.append(held)

    def drop_idle(self) -> None:
        """Whoever calls next connects anew."""
        while (held := self.take_idle()) is not None:
            self.drop(held)
        self._pool.disconnect(inuse_connections=False)

    def drop(self, held: Held) -> None:
        """Replies may still be on their way: close it."""
        held.connection.disconnect()
        self._pool.release(held.connection)


def _server_of(connection: Any) -> str:
    connection.send_command("INFO", "server")
    try:
        found = _RUN_ID.search(connection.read_response())
    except ResponseError:  # a managed Redis may refuse to tell
        return ""
    return found[1].decode() if found else ""
