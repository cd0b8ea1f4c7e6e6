"""A batch whose frames the learner reads from Redis itself: how the service names them, and how they are read.

    learner --POST /batches/t?frames=named--> service --> start of the batch's frame, keys, a user that may read them
       '------------ MGET over the unix socket ---------> Redis

Half of the work of a pull is the service's copying from one socket to another. Only a Redis on a unix socket is named:
who can open it runs on its machine under its account. Whatever goes wrong here, the caller asks the service for the
whole batch instead (ADR 0127).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import msgpack
import numpy as np

from bapo.blocks import Blocks
from bapo.idle import Idle

MEDIA_TYPE = "application/vnd.bapo.named-frames"
AT_ONCE_BYTES = 1 << 20
"""Asked for together: few enough to stay in the processor's cache on their way."""
LINE_BYTES = 64
"""Longer than any line that comes before a frame."""
SMALL_BYTES = 1 << 16
"""Frames up to this size are received many at a time and copied; larger ones are received where they belong."""
CONNECTIONS = 4


class NotReadableError(Exception):
    """Redis did not hand out what was named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFrames:
    """A batch without its frames."""

    path: str
    """Unix socket of the Redis that holds them."""
    user: str
    password: str
    start: bytes
    """What precedes the frames in the batch's frame."""
    keys: tuple[str, ...]
    num_bytes: int
    """Of all frames together."""


def pack_named(named: NamedFrames) -> bytes:
    """As it travels."""
    packed: bytes = msgpack.packb(asdict(named))
    return packed


def unpack_named(data: bytes) -> NamedFrames:
    """Inverse of `pack_named`. Raises: NotReadableError."""
    try:
        fields = msgpack.unpackb(data)
        return NamedFrames(**{**fields, "keys": tuple(fields["keys"])})
    except (TypeError, KeyError, ValueError, msgpack.UnpackException) as error:
        raise NotReadableError(f"the answer names no frames: {error}") from error


class FrameReader:
    """Reads named frames. Thread-safe: each call has a connection to itself."""

    def __init__(self, timeout_s: float, blocks: Blocks | None = None) -> None:
        """`timeout_s` is the longest silence of Redis; batches come into `blocks`."""
        self._timeout_s, self._blocks = timeout_s, blocks or Blocks()
        self._idle: Idle[_Connection] = Idle(CONNECTIONS)

    def batch_frame(self, named: NamedFrames) -> memoryview:
        """The whole frame of the batch. Raises: NotReadableError when a frame is gone, or Redis does not answer."""
        whole = self._blocks.take(len(named.start) + named.num_bytes)
        whole[: len(named.start)] = named.start
        try:
            with self._connection(named) as connection:
                connection.read(named.keys, whole[len(named.start) :])
        except (OSError, ValueError) as error:
            raise NotReadableError(f"the frames of the batch cannot be read at {named.path}: {error}") from error
        return whole.toreadonly()

    def close(self) -> None:
        """Close what is idle."""
        self._idle.close()

    @contextmanager
    def _connection(self, named: NamedFrames) -> Iterator[_Connection]:
        login = (named.path, named.user, named.password)
        connection = self._idle.take() or _Connection(login, self._timeout_s)
        if connection.login != login:
            connection.close()
            connection = _Connection(login, self._timeout_s)
        try:
            yield connection
        except BaseException:  # answers may still be on their way
            connection.close()
            raise
        if not self._idle.keep(connection):
            connection.close()


class _Connection:
    def __init__(self, login: tuple[str, str, str], timeout_s: float) -> None:
        self.login = login
        self._ahead = np.empty(4 * SMALL_BYTES, np.uint8).data
        self._start = self._end = 0
        """Of what was received there, and not looked at yet."""
        self._at_once = LINE_BYTES
        """Received when a line is wanted: what comes behind it is a frame."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout_s)
            self._log_in(*login)
        except BaseException:
            self.close()
            raise

    def _log_in(self, path: str, user: str, password: str) -> None:
        self._socket.connect(path)
        self._socket.sendall(_command("AUTH", user, password))
        if (said := self._line()) != b"+OK":
            raise NotReadableError(f"Redis does not let us in: {said[:80]!r}")

    def close(self) -> None:
        self._socket.close()

    def read(self, keys: Sequence[str], room: memoryview) -> None:
        """Their values one after the other, which fill the room. More are asked for before the last ones are read."""
        number = max(1, AT_ONCE_BYTES * len(keys) // max(1, len(room)))
        self._at_once = LINE_BYTES if len(room) > SMALL_BYTES * len(keys) else len(self._ahead)
        parts = [keys[first : first + number] for first in range(0, len(keys), number)]
        end = 0
        for index, part in enumerate(parts):
            if index == 0:
                self._ask(part)
            if index + 1 < len(parts):
                self._ask(parts[index + 1])
            if (said := self._line()) != b"*%d" % len(part):
                raise NotReadableError(f"Redis answered MGET with {said[:80]!r}")
            for _ in part:
                end += self._value(room[end:])
        if end != len(room):
            raise NotReadableError(f"the frames of the batch have {end} bytes instead of {len(room)}")

    def _ask(self, keys: Sequence[str]) -> None:
        self._socket.sendall(_command("MGET", *keys))

    def _value(self, room: memoryview) -> int:
        line = self._line()
        if line[:1] != b"$" or not line[1:].isdigit() or int(line[1:]) > len(room):  # $-1: there is no such key
            raise NotReadableError(f"a frame of the batch is gone: {line[:80]!r}")
        size = int(line[1:])
        here = min(size, self._end - self._start)
        room[:here] = self._ahead[self._start : self._start + here]
        self._start += here
        while here < size:
            received = self._socket.recv_into(room[here:size])
            if not received:
                raise NotReadableError("Redis has gone")
            here += received
        if self._line():
            raise NotReadableError("a frame does not end where it should")
        return size

    def _line(self) -> bytes:
        while True:
            found = bytes(self._ahead[self._start : min(self._end, self._start + LINE_BYTES)])
            if (length := found.find(b"\r\n")) >= 0:
                self._start += length + 2
                return found[:length]
            if len(found) == LINE_BYTES:  # only what Redis complains of may be as long
                raise NotReadableError(f"Redis says {found!r}")
            self._ahead[: len(found)] = found
            self._start, self._end = 0, len(found)
            received = self._socket.recv_into(self._ahead[self._end : self._end + self._at_once])
            if not received:
                raise NotReadableError("Redis has gone")
            self._end += received


def _command(*words: str) -> bytes:
    return b"".join(
        [b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in map(str.encode, words))]
    )
