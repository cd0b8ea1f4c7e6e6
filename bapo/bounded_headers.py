"""Bounds on what comes before a request's body: nothing of it is known yet, so nobody may send it for ever.

uvicorn's httptools protocol keeps every header that it is sent and waits for the rest as long as it takes; that is
memory and connections for whoever reaches the port, before any token is asked for.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from bapo.errors import ContractError, Refusal

MOST_HEADER_BYTES = 64 << 10
"""Path and headers of one request, beyond what one read brought with its first byte: 256 KiB at most."""
HEADERS_S = 30.0
"""From a new connection, or the first byte of a request, to the end of its headers."""
HEAD = """\
HTTP/1.1 {0.value} {0.phrase}\r
content-type: application/json\r
content-length: {1}\r
connection: close\r
\r
"""


class BoundedHeaders:
    """Mixed into uvicorn's httptools protocol, before it: `class Protocol(BoundedHeaders, HttpToolsProtocol)`.

    What it refuses is told to `app.state.refused`, where an app has that (a metric). Headers behind a body of chunks
    are dropped, and more than MOST_HEADER_BYTES of them end the connection.
    """

    _has_headers = False
    _header_bytes = 0
    """That came since the request began, or since the newest bytes of its body."""
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
        if self._header_bytes <= MOST_HEADER_BYTES or self.transport.is_closing():
            return
        if self._has_headers:  # an answer may be on its way, or out: nothing else can be said
            self._count(Refusal.TOO_LARGE)
            self.transport.close()
        else:
            message = f"more than {MOST_HEADER_BYTES} bytes of path and headers"
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, Refusal.TOO_LARGE, message)

    def send_400_response(self: Any, msg: str) -> None:
        """What is no HTTP is refused as everything else is."""
        self._refuse(HTTPStatus.BAD_REQUEST, Refusal.CONTRACT, msg)

    def _count(self: Any, reason: Refusal) -> None:
        state = getattr(self.config.loaded_app, "state", None)
        if (refused := getattr(state, "refused", None)) is not None:
            refused(reason)

    def _refuse(self: Any, status: HTTPStatus, reason: Refusal, message: str) -> None:
        self._count(reason)
        body = json.dumps({"error": ContractError.__name__, "message": message, "retry": False})
        self.transport.write((HEAD.format(status, len(body)) + body).encode())
        self.transport.close()

    def on_message_begin(self: Any) -> None:
        self._expect_headers()
        super().on_message_begin()  # type: ignore[misc]

    def on_header(self: Any, name: bytes, value: bytes) -> None:
        if not self._has_headers:  # the request was admitted by those that it had, and uvicorn would keep these, too
            super().on_header(name, value)  # type: ignore[misc]

    def on_headers_complete(self: Any) -> None:
        self._has_headers, self._header_bytes = True, 0
        self._stop_waiting()
        super().on_headers_complete()  # type: ignore[misc]

    def on_body(self: Any, body: bytes) -> None:
        self._header_bytes = 0
        super().on_body(body)  # type: ignore[misc]

    def _expect_headers(self: Any) -> None:
        self._has_headers, self._header_bytes = False, 0
        self._stop_waiting()
        self._headers_due = self.loop.call_later(HEADERS_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None
