"""uvicorn's httptools protocol as this service uses it: large bodies stay in the socket, pushes go past the app.

It relies on the insides of uvicorn's protocol: the version is pinned, and tests/integration says so.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from buffer_service.direct import EXTENSION, LARGE_BYTES, Direct
from buffer_service.shortcut import METHOD, URL, PushCycle


class DirectProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which offers a `Direct` in the scope of a request, and takes pushes past the app."""

    _push: PushCycle | None = None
    is_lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """`closing` is held while `is_lost` becomes True, which is before the socket is closed."""
        self.closing = threading.Lock()
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed behind this."""
        with self.closing:
            self.is_lost = True
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        """Stop reading before a large body, so that it stays in the socket."""
        if isinstance(self.cycle, PushCycle):
            self.cycle.end_answered()
            self._unset_keepalive_if_required()  # it has armed the timer, but the next request is here
        is_alone = self.cycle is None or self.cycle.response_complete
        is_direct = is_alone and self.scheme == "http" and not self.expect_100_continue
        if is_direct and self.url == URL and self._begin_push():
            return
        before = self.cycle
        super().on_headers_complete()
        if not is_direct or self.cycle is before:  # of an upgrade there is none, and nobody would read on
            return
        cast("dict[str, Any]", self.scope).setdefault("extensions", {})[EXTENSION] = Direct(self, self.cycle)
        declared = next((value for name, value in self.headers if name == b"content-length"), b"")
        if declared.isdigit() and int(declared) >= LARGE_BYTES:
            self.flow.pause_reading()

    def _begin_push(self) -> bool:
        """Whether this request goes past the app."""
        shortcut = getattr(getattr(self.config.loaded_app, "state", None), "shortcut", None)
        if shortcut is None or self.parser.get_method() != METHOD or not self.parser.should_keep_alive():
            return False
        if self.parser.should_upgrade() or (size := shortcut.admitted_bytes(self.headers)) is None:
            return False
        self._push = PushCycle(self, shortcut, size)
        self.cycle = cast("RequestResponseCycle", self._push)
        return True

    def data_received(self, data: bytes) -> None:
        """A push begins when all that came with its headers has been parsed."""
        super().data_received(data)
        push, self._push = self._push, None
        if push is not None:
            push.begin()

    def direct(self, cycle: PushCycle) -> Direct:
        """The direct way of a push."""
        return Direct(self, cast("RequestResponseCycle", cycle))

    def begin_anew(self) -> None:
        """Expect a request: the parser waits for a body that somebody else has read, and cannot be told."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
