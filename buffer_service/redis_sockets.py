"""Connections to Redis that send many frames with one system call and without copying them.

redis-py sends a command in as many calls as it has large arguments; for a push of sixteen groups of 20 kB that wakes
Redis 32 times and takes five times longer. Does not cover TLS, whose sockets cannot gather: there redis-py's own way.
"""

from __future__ import annotations

import builtins
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import hiredis
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.connection import Connection, PythonRespSerializer, UnixDomainSocketConnection
from redis.exceptions import ConnectionError, TimeoutError

COPY_BELOW_BYTES = 6000
"""Smaller arguments are joined, larger ones are sent as they are."""
MOST_PIECES = 512
"""Of one system call; Linux allows 1024."""

Arg = str | bytes | int | float | memoryview


class Gathering:
    """Mixed into a connection class of redis-py."""

    def send_packed_command(self: Any, command: Sequence[bytes | memoryview] | str, check_health: bool = True) -> None:
        """As the base class does, with one sendmsg for many pieces."""
        if isinstance(command, str) or len(command) < 2:
            super().send_packed_command(command, check_health)  # type: ignore[misc]
            return
        super().send_packed_command((), check_health)  # type: ignore[misc]  # connects when needed, sends nothing
        try:
            send_pieces(self._sock, command)
        except builtins.TimeoutError as error:
            self.disconnect()
            raise TimeoutError("Timeout writing to socket") from error
        except OSError as error:
            self.disconnect()
            raise ConnectionError(f"Error while writing to socket: {error.strerror}") from error

    def read_replies(self: Any, number: int) -> list[Any]:
        """So many replies as hiredis parses them, errors among them as exceptions that nobody has raised."""
        parser = self._parser
        replies: list[Any] = []
        while len(replies) < number:
            reply = parser._reader.gets(False)
            if reply is not NOT_ENOUGH_DATA:
                replies.append(reply)
                continue
            try:
                parser.read_from_socket()
            except OSError as error:
                raise ConnectionError(f"Error while reading from socket: {error.strerror}") from error
        return replies


class GatheringConnection(Gathering, Connection):
    """TCP."""


class GatheringUnixConnection(Gathering, UnixDomainSocketConnection):
    """A unix socket."""


class Packer:
    """Arguments -> pieces to send. SET carries a frame: its value stays a piece of its own, uncopied."""

    def __init__(self) -> None:
        self._pieces = PythonRespSerializer(COPY_BELOW_BYTES, _as_bytes)

    def pack(self, *args: Arg) -> list[bytes | memoryview]:
        """As redis-py asks for. hiredis is ten times faster on a script's hundreds of small arguments, but copies."""
        if args[0] == "SET":
            return list(self._pieces.pack(*args))  # type: ignore[no-untyped-call]
        name, *rest = args
        return [hiredis.pack_command((*str(name).encode().split(), *rest))]  # type: ignore[arg-type]


def connection_options(url: str) -> dict[str, Any]:
    """Keywords for redis-py's pool: which class connects, and who packs arguments."""
    options: dict[str, Any] = {"command_packer": Packer()}
    classes = {"redis": GatheringConnection, "unix": GatheringUnixConnection}
    if found := classes.get(urlsplit(url).scheme):
        options["connection_class"] = found
    return options


def send_pieces(sock: socket.socket, pieces: Sequence[bytes | memoryview]) -> None:
    """All bytes of all pieces, in order. Raises: OSError."""
    left = [memoryview(piece) for piece in pieces if len(piece)]
    first = 0
    while first < len(left):
        sent = sock.sendmsg(left[first : first + MOST_PIECES])
        while first < len(left) and sent >= len(left[first]):
            sent -= len(left[first])
            first += 1
        if sent:
            left[first] = left[first][sent:]


def _as_bytes(value: Arg) -> bytes | memoryview:
    return value if isinstance(value, bytes | memoryview) else str(value).encode()
