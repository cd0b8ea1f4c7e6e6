"""Keep-alive HTTP/1.1 connections for our own services: bodies leave in pieces, uncopied, and arrive in one block.

A general client spends a quarter of a millisecond on each call (header objects, retry objects, redirects, decoding);
a push of a small group takes less than that in the whole service.

Covers: http and https, Content-Length and chunked answers, connections that the server has closed meanwhile.
Does not cover: redirects, proxies, compression, cookies. Raises OSError and HttpError; what to repeat is up to others.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from typing import Any
from urllib.parse import urlsplit

from bapo.blocks import Blocks
from bapo.idle import Idle

Piece = bytes | bytearray | memoryview

MOST_LINE_BYTES = 1 << 16
MOST_HEADERS = 100
MOST_PIECES = 512
"""Of one system call; Linux allows 1024."""
READ_AHEAD_BYTES = 1 << 16
NO_BODY = (204, 304)


class HttpError(Exception):
    """What came is no HTTP answer, or was cut off."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of a server."""

    status: int
    headers: Mapping[str, str]
    """By lower-case name."""
    body: bytes | memoryview


class Pool:
    """Idle connections to one origin, the newest first. Thread-safe: each call has a connection to itself."""

    def __init__(self, origin: str, *, connect_timeout_s: float, most_idle: int) -> None:
        """
        Args:
            origin: `http://host:port`, and a path below which everything lies if there is one.
        Raises: ValueError for any other URL, also one with a password or a query, of which nothing would be sent.
        """
        parts = urlsplit(origin)
        if "@" in parts.netloc:
            raise ValueError(
                "it has a user or a password, which nobody would be sent; tokens have a place of their own"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{origin!r} is not of the form http://host:port")
        self._address = (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
        self._host, self._prefix = parts.netloc.rpartition("@")[2], parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_timeout_s = connect_timeout_s
        self._idle: Idle[_Connection] = Idle(most_idle)

    def request(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Sequence[Piece],
        *,
        timeout_s: float,
        blocks: Blocks | None = None,
    ) -> Reply:
        """One call. `timeout_s` is the longest silence; a body of known length fills one of `blocks`.

        Raises: OSError, HttpError.
        """
        size = sum(map(len, body))
        lines = [f"{method} {self._prefix}{target} HTTP/1.1", f"Host: {self._host}"]
        if size or method != "GET":
            lines.append(f"Content-Length: {size}")
        lines += [f"{name}: {value}" for name, value in headers.items()]
        with self._connection() as connection:
            return connection.exchange(["\r\n".join([*lines, "", ""]).encode("latin-1"), *body], timeout_s, blocks)

    def close(self) -> None:
        """Close what is idle; a call opens connections again."""
        self._idle.close()

    @contextmanager
    def _connection(self) -> Iterator[_Connection]:
        connection = self._fresh_idle() or _Connection(self._connected())
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        if not (connection.may_be_kept and self._idle.keep(connection)):
            connection.close()

    def _fresh_idle(self) -> _Connection | None:
        while (connection := self._idle.take()) is not None:
            if not connection.has_news():
                return connection
            connection.close()
        return None

    def _connected(self) -> socket.socket:
        connected = socket.create_connection(self._address, timeout=self._connect_timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._tls.wrap_socket(connected, server_hostname=self._address[0]) if self._tls else connected


class _Connection:
    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._file: BufferedReader[Any] = connected.makefile("rb", buffering=READ_AHEAD_BYTES)  # type: ignore[assignment]
        self._poller = select.poll()
        self._poller.register(connected, select.POLLIN)
        self.may_be_kept = False

    def has_news(self) -> bool:
        """Something came while nothing was asked: the end, most likely, or what would pass for the next answer."""
        return bool(self._poller.poll(0)) or self._has_read_ahead()

    def _has_read_ahead(self) -> bool:
        self._socket.settimeout(0)  # a look at the buffer reads when that is empty
        try:
            return bool(self._file.peek(1))
        except ssl.SSLWantReadError:
            return False

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def exchange(self, pieces: Sequence[Piece], timeout_s: float, blocks: Blocks | None) -> Reply:
        self.may_be_kept = False
        self._socket.settimeout(timeout_s)
        try:
            self._send(pieces)
        except (BrokenPipeError, ConnectionResetError) as error:
            # A server that refuses a body says why, and closes: its answer may be there.
            try:
                return self._read_reply()
            except (OSError, HttpError):
                raise error from None
        reply = self._read_reply(blocks)
        self.may_be_kept = reply.headers.get("connection", "").lower() != "close"
        return reply

    def _send(self, pieces: Sequence[Piece]) -> None:
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.sendall(b"".join(pieces))
            return
        left = [memoryview(piece) for piece in pieces if len(piece)]
        first = 0
        while first < len(left):
            sent = self._socket.sendmsg(left[first : first + MOST_PIECES])
            while first < len(left) and sent >= len(left[first]):
                sent -= len(left[first])
                first += 1
            if sent:
                left[first] = left[first][sent:]

    def _read_reply(self, blocks: Blocks | None = None) -> Reply:
        status = 100
        while 100 <= status < 200:
            status, headers = self._status(), self._headers()
        if status in NO_BODY:
            return Reply(status, headers, b"")
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return Reply(status, headers, b"".join(self._chunks()))
        declared = headers.get("content-length", "")
        if not declared and headers.get("connection", "").lower() == "close":
            return Reply(status, headers, self._file.read())
        if not declared.isdigit():
            raise HttpError("an answer without a length")
        size = int(declared)
        return Reply(status, headers, self._exactly(size) if blocks is None else self._into(blocks.take(size)))

    def _status(self) -> int:
        words = self._line().split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise HttpError(f"no HTTP answer: {b' '.join(words)[:80]!r}")
        return int(words[1])

    def _headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        while line := self._line():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
            if len(headers) > MOST_HEADERS:
                raise HttpError(f"more than {MOST_HEADERS} headers")
        return headers

    def _chunks(self) -> Iterator[bytes]:
        while True:
            length = self._line().partition(b";")[0]
            try:
                size = int(length, 16)
            except ValueError:
                raise HttpError(f"a chunk of length {length[:20]!r}") from None
            if size == 0:
                self._headers()  # trailers
                return
            yield self._exactly(size)
            self._line()

    def _exactly(self, size: int) -> bytes:
        # One block of this size, filled by the kernel: makefile's buffer is left out for what is larger.
        body: bytes = self._file.read(size)
        if len(body) != size:
            raise _cut_off(len(body), size)
        return body

    def _into(self, block: memoryview) -> memoryview:
        if (found := self._file.readinto(block)) != len(block):
            raise _cut_off(found, len(block))
        return block.toreadonly()

    def _line(self) -> bytes:
        line: bytes = self._file.readline(MOST_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise HttpError("the connection ended before the answer did")
        return line.rstrip(b"\r\n")


def _cut_off(found: int, size: int) -> HttpError:
    return HttpError(f"the answer is cut off: {found} of {size} bytes")
