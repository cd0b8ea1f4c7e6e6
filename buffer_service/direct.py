"""Large bodies between a worker thread and the socket itself, past the event loop.

uvicorn copies a body five times and wakes the event loop for every 64 kB of it; for frames that is most of what a push
or a batch costs. Here a worker thread reads the rest of a request's body from the socket, or writes a response's body
to it, while the event loop leaves this one connection alone:

    event loop   headers -> gate -> route --.                              .--> answer, next request
    worker                                   `-> read body -> check -> Redis

A sender that is slow costs no thread: after PATIENCE_S of waiting the event loop waits for it instead. A reader that is
slow holds one of the threads (`buffer_service.threads`) as long as it takes something every SILENCE_S.
Only plain TCP under `buffer_service.protocol` offers this; everything else (TLS, other servers, tests) takes the
ordinary way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from fastapi import Request
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from bapo import gate
from bapo.errors import UnavailableError
from buffer_service.threads import P, T, in_thread

if TYPE_CHECKING:
    from buffer_service.protocol import DirectProtocol

log = logging.getLogger(__name__)

Headers = Sequence[tuple[bytes, bytes]]

EXTENSION = "bapo.direct"
LARGE_BYTES = 1 << 16
"""Smaller bodies are read with their headers."""
PATIENCE_S = 0.02
SILENCE_S = 30.0
"""A peer that takes nothing for so long is cut off."""
MOST_PIECES = 512
"""Of one system call; Linux allows 1024."""


class SilentError(OSError):
    """The peer stopped in the middle of a body, and has not gone."""


def direct_of(scope: MutableMapping[str, Any]) -> Direct | None:
    """The direct way of this request, if there is one."""
    found = scope.get("extensions", {}).get(EXTENSION)
    return found if isinstance(found, Direct) else None


def gone(request: Request) -> Callable[[], Awaitable[bool]]:
    """What tells whether the sender of a request has gone. Starlette's way tries to receive something, in a scope of
    its own that is cancelled at once: more than all else of a small call."""
    direct = direct_of(request.scope)
    if direct is None:
        return request.is_disconnected

    async def is_gone() -> bool:
        return not direct.is_open

    return is_gone


async def in_thread_unless_gone(request: Request, function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """Call a function that blocks and sets back what others have done since it was asked for.

    A service that stood still, or a link that did, brings what its sender has given up, and had done by another one.
    Raises: UnavailableError when the sender has gone.
    """
    direct = direct_of(request.scope)

    def call() -> T:
        if direct is not None and direct.has_hung_up:
            raise _too_late(request)
        return function(*args, **keywords)

    if direct is None and await request.is_disconnected():
        raise _too_late(request)
    return await in_thread(call)


def _too_late(request: Request) -> UnavailableError:
    what = f"{request.method} {request.url.path}"
    log.warning("%s is not carried out: its sender has given up", what)
    return UnavailableError(f"{what} came too late")


class Direct:
    """One request's connection. The methods that block are for worker threads, all others for the event loop."""

    def __init__(self, protocol: DirectProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol, self._cycle = protocol, cycle

    @property
    def is_open(self) -> bool:
        """The peer has not gone, as far as the event loop knows."""
        return not (self._cycle.disconnected or self._protocol.transport.is_closing())

    @property
    def has_hung_up(self) -> bool:
        """The peer has gone, also where the event loop has not heard of it: this process may have stood still. For
        worker threads."""
        try:
            with self.descriptor() as descriptor:
                return bool(_poller(descriptor, select.POLLRDHUP).poll(0))
        except ConnectionError:
            return True

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """The socket, as a descriptor of its own: the event loop may close its one at any time.

        Raises: ConnectionError when it has.
        """
        with self._protocol.closing:  # or the number may be another connection's by now
            if self._protocol.is_lost:
                raise ConnectionResetError("the peer has gone")
            descriptor = os.dup(self._protocol.transport.get_extra_info("socket").fileno())
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def take_begun(self) -> bytes:
        """What of the body came with the headers; from here on, the event loop reads nothing."""
        self._protocol.flow.pause_reading()
        begun, self._cycle.body = bytes(self._cycle.body), bytearray()
        return begun

    def take_whole(self) -> bytes:
        """All of the body, when it came with the headers."""
        return bytes(self._cycle.body)

    def take_rest(self, size: int) -> bool:
        """Read what is in the socket already; True when the body, of `size` bytes, is whole. Does not block."""
        body = self._cycle.body
        socket = self._protocol.transport.get_extra_info("socket")
        try:
            body += os.read(socket.fileno(), size - len(body))
        except OSError:  # nothing there, or gone: whoever waits for it will see
            return False
        if len(body) == size:
            self.body_was_read()
        return len(body) == size

    def head(self, status: int, headers: Headers) -> bytes:
        """Status line and headers as uvicorn writes them."""
        own = [] if self._cycle.keep_alive else [(b"connection", b"close")]
        lines = [b"%b: %b\r\n" % pair for pair in (*self._protocol.server_state.default_headers, *headers, *own)]
        return b"".join([STATUS_LINE[status], *lines, b"\r\n"])

    @property
    def has_unsent(self) -> bool:
        """The event loop has yet to write something."""
        return bool(self._protocol.transport.get_write_buffer_size())

    @property
    def is_whole(self) -> bool:
        """All of the body came with the headers."""
        return not self._cycle.more_body

    def body_was_read(self) -> None:
        """The body is over: the next bytes on the connection are a new request."""
        self._cycle.more_body = False
        self._protocol.begin_anew()

    def answer_begins(self) -> None:
        """From here on the event loop sends nothing: not even when it cancels the request, at the end of the server."""
        self._cycle.response_started = True
        cast("dict[str, Any]", self._cycle.scope)[gate.BEGUN] = True

    def answer_was_written(self) -> None:
        """The head and all of the body are out."""
        self._cycle.chunked_encoding = False
        self._cycle.expected_content_length = 0

    def abort(self) -> None:
        """Close the connection: a body was cut off, and nothing else can say so."""
        self._cycle.disconnected = True  # nothing more is sent, and uvicorn does not complain about that
        self._protocol.transport.close()


def receive(descriptor: int, rest: memoryview) -> Iterator[int]:
    """Read until `rest` is full, PATIENCE_S are waited or the peer has gone. Blocks. Yields: bytes read, each time.

    All waits together count: who sends a little every now and then would keep a thread, and forty of them all threads.
    Raises: ConnectionError when the peer has gone.
    """
    filled = 0
    poller: select.poll | None = None
    waited_s = 0.0
    while filled < len(rest):
        try:
            received = os.readv(descriptor, [rest[filled:]])
        except BlockingIOError:
            poller = poller or _poller(descriptor, select.POLLIN)
            begun = time.monotonic()
            if waited_s >= PATIENCE_S or not poller.poll(1000 * PATIENCE_S):
                break
            waited_s += time.monotonic() - begun
            continue
        if received == 0 and filled:
            break  # what came is counted first; the next call finds the end again
        if received == 0:
            raise ConnectionResetError("the peer closed the connection in the middle of a body")
        filled += received
        yield received


def transmit(descriptor: int, pieces: Sequence[bytes | memoryview]) -> int:
    """Write all pieces. Blocks as long as the peer takes something every SILENCE_S. Returns: bytes written.

    Raises: SilentError when it does not; OSError when it has gone.
    """
    left = [memoryview(piece) for piece in pieces if len(piece)]
    total, first = 0, 0
    poller: select.poll | None = None
    while first < len(left):
        try:
            sent = os.writev(descriptor, left[first : first + MOST_PIECES])
        except BlockingIOError:
            poller = poller or _poller(descriptor, select.POLLOUT)
            if not poller.poll(1000 * SILENCE_S):
                raise SilentError(f"the peer took nothing for {SILENCE_S:.0f} s") from None
            continue
        total += sent
        while first < len(left) and sent >= len(left[first]):
            sent -= len(left[first])
            first += 1
        if sent:
            left[first] = left[first][sent:]
    return total


async def readable(descriptor: int) -> None:
    """Wait, without a thread, until there is something to read. Raises: SilentError after the gate's BODY_PAUSE_S."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        await asyncio.wait_for(event.wait(), gate.BODY_PAUSE_S)
    except TimeoutError:
        raise SilentError(f"nothing of the body came for {gate.BODY_PAUSE_S:.0f} s") from None
    finally:
        loop.remove_reader(descriptor)


def _poller(descriptor: int, events: int) -> select.poll:
    poller = select.poll()
    poller.register(descriptor, events)
    return poller
