"""Bounds on what comes before a request's body: nothing of it is known yet, so nobody may send it for ever.

uvicorn's httptools protocol keeps every header that it is sent and waits for the rest as long as it takes; that is
memory and connections for whoever reaches the port, before any token is asked for.
"""

from __future__ import annotations

import asyncio
from typing import Any

MOST_HEADER_BYTES = 64 << 10
"""Path and headers of one request."""
HEADERS_S = 30.0
"""From a new connection, or the first byte of a request, to the end of its headers."""
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedHeaders:
    """Mixed into uvicorn's httptools protocol, before it: `class Protocol(BoundedHeaders, HttpToolsProtocol)`."""

    _has_headers = False
    _header_bytes = 0
    _headers_due: asyncio.TimerHandle | None = None

    def connection_made(self: Any, transport: Any) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._expect_headers()

    def connection_lost(self: Any, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)  # type: ignore[misc]

    def data_received(self: Any, data: bytes) -> None:
        self._header_bytes += len(data)
        super().data_received(data)  # type: ignore[misc]
        if not self._has_headers and self._header_bytes > MOST_HEADER_BYTES and not self.transport.is_closing():
            self.transport.write(TOO_LARGE)
            self.transport.close()

    def on_message_begin(self: Any) -> None:
        self._expect_headers()
        super().on_message_begin()  # type: ignore[misc]

    def on_headers_complete(self: Any) -> None:
        self._has_headers = True
        self._stop_waiting()
        super().on_headers_complete()  # type: ignore[misc]

    def _expect_headers(self: Any) -> None:
        self._has_headers, self._header_bytes = False, 0
        self._stop_waiting()
        self._headers_due = self.loop.call_later(HEADERS_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None
