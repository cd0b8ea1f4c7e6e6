"""Frames in and out of Redis without a copy: commands as pieces for one sendmsg, bulk replies read in place.

hiredis copies every bulk string twice, which for frames is most of what a read costs. Everything that is small goes
through hiredis; the replies of MGET are read from the socket into one block, and handed out as views into it.
"""

from __future__ import annotations

import builtins
import socket
from collections.abc import Callable

import hiredis
from redis.exceptions import ConnectionError, InvalidResponse, TimeoutError

from buffer_service.blocks import new_block

LINE_BYTES = 64
"""A bulk string's header is at most `$`, 20 digits and two more."""
LEAST_BLOCK = 1 << 18
NOTHING = (b"$-1", b"_")
"""How RESP2 and RESP3 say that there is no such key."""


def set_pieces(key: str, value: bytes | memoryview, ttl_ms: int) -> tuple[bytes, bytes | memoryview, bytes]:
    """SET key value PX ttl, its value a piece of its own."""
    name, ttl = key.encode(), str(ttl_ms).encode()
    head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(value))
    return head, value, b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)


def command(*args: str | bytes | int | float | memoryview) -> bytes:
    """Any command whose arguments are small."""
    packed: bytes = hiredis.pack_command(args)  # type: ignore[arg-type]
    return packed


class BulkReader:
    """Reads the replies of MGET from a socket.

    A view stays valid until the next `read` that is told to reuse the block.
    """

    def __init__(self, receive_into: Callable[[memoryview], int], error_of: Callable[[str], Exception]) -> None:
        """
        Args:
            receive_into: fills a part of a buffer, as `socket.recv_into` does.
            error_of: the exception for what Redis said behind a `-`.
        """
        self._receive_into, self._error_of = receive_into, error_of
        self._block = new_block(LEAST_BLOCK)
        self._start = self._end = 0

    def read(self, number: int, *, expected_bytes: int = 0, reuse: bool = False) -> list[memoryview | None]:
        """The `number` bulk strings of one array reply; None for a missing one.

        Args:
            expected_bytes: how large they are together, if that is known: saves moving them.
            reuse: write over the views of the last read.
        Raises: what `error_of` makes of an error reply; ConnectionError; InvalidResponse.
        """
        unread = self._end - self._start  # the beginning of this answer may have come with the end of the last one
        room = max(LEAST_BLOCK, unread, expected_bytes + number * LINE_BYTES + LINE_BYTES)
        block = self._block if reuse and len(self._block) >= room else new_block(room)
        block[:unread] = self._block[self._start : self._end]
        self._block, self._start, self._end = block, 0, unread
        line = self._line()
        if line[:1] == b"-":
            raise self._error_of(line[1:].decode())
        if line != b"*%d" % number:
            raise InvalidResponse(f"Redis answered MGET of {number} keys with {line[:40]!r}")
        return [self._bulk() for _ in range(number)]

    def _bulk(self) -> memoryview | None:
        line = self._line()
        if line in NOTHING:
            return None
        if line[:1] != b"$":
            raise InvalidResponse(f"Redis answered MGET with {line[:40]!r}")
        size = int(line[1:])
        self._fill(size + 2)
        value = self._block[self._start : self._start + size]
        self._start += size + 2
        return value

    def _line(self) -> bytes:
        while True:
            found = bytes(self._block[self._start : min(self._end, self._start + LINE_BYTES)])
            if (length := found.find(b"\r\n")) >= 0:
                self._start += length + 2
                return found[:length]
            if len(found) == LINE_BYTES:
                if found[:1] != b"-":  # an error's text may be longer, nothing else
                    raise InvalidResponse(f"Redis answered MGET with {found[:40]!r}")
                self._start = self._end
                return found
            self._fill(len(found) + 1)

    def _fill(self, wanted: int) -> None:
        """Have at least so many unread bytes in the block, which grows when they do not fit."""
        if self._start + wanted > len(self._block):
            unread = self._end - self._start
            block = new_block(max(len(self._block), wanted + LINE_BYTES))
            block[:unread] = self._block[self._start : self._end]
            self._block, self._start, self._end = block, 0, unread
        while self._end - self._start < wanted:
            received = self._receive_into(self._block[self._end :])
            if received == 0:
                raise ConnectionError("Connection closed by server.")
            self._end += received


def receiver(sock: socket.socket) -> Callable[[memoryview], int]:
    """`receive_into` of a socket; errors as redis-py names them."""

    def receive_into(block: memoryview) -> int:
        try:
            return sock.recv_into(block)
        except builtins.TimeoutError as error:
            raise TimeoutError("Timeout reading from socket") from error
        except OSError as error:
            raise ConnectionError(f"Error while reading from socket: {error.strerror}") from error

    return receive_into
