"""Pushes past the ASGI app: what most requests are, answered by the thread that has stored them.

Of a push of one small group, uvicorn's and FastAPI's way from the headers to the route and back is half of all the
time that the service spends. A push that is beyond doubt - `POST /groups`, one length, a right to do it, room in the
buffer - goes this way instead:

    event loop   headers, admitted here -> small body -> check -> Redis --answer within PATIENCE_S--> answer
                          | large body                              |
    worker                `-> read body -> check -> Redis -> answer `-- later -> answer

Whatever is not beyond doubt takes the ordinary way, which refuses it in its words, counts and logs it: this module
refuses nothing before a body is read, and its errors afterwards are made by the app's own function.
Offered by `buffer_service.protocol.DirectProtocol`, so only without TLS and under uvicorn's httptools protocol.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from fastapi import Response

from bapo.errors import BapoError, FullError
from bapo.gate import RefusedError, check_right, declared_length
from bapo.tokens import Keyring
from buffer_service.arrival import Arrival
from buffer_service.bodies import Body, Intake
from buffer_service.context import Context
from buffer_service.direct import Direct, Headers
from buffer_service.metrics import BufferMetrics
from buffer_service.refusals import error_response
from buffer_service.rights import RULES
from buffer_service.steps import Steps, finish, finish_soon
from buffer_service.threads import in_thread

if TYPE_CHECKING:
    from buffer_service.protocol import DirectProtocol

log = logging.getLogger(__name__)

METHOD, URL = b"POST", b"/groups"
SMALL_BYTES = 1 << 17
"""What the event loop stores by itself, if nothing blocks: two changes of threads cost more than looking at so much,
and it fits into the buffer of a unix socket."""
PATIENCE_S = 0.002
"""How long the event loop waits for Redis; then a worker thread does. Redis takes a tenth, unless it assembles."""
OPERATION = "push"
"""Under which its time is measured: the name of the route."""


class PushShortcut:
    """What one app takes this way. `admitted_bytes` and `push` are all that a protocol asks of it."""

    def __init__(self, context: Context, metrics: BufferMetrics, keyring: Keyring | None) -> None:
        self._context, self._metrics, self._keyring = context, metrics, keyring
        self._rule = RULES.find(METHOD.decode(), URL.decode())

    def admitted_bytes(self, headers: Headers) -> int | None:
        """Length of the body of a push that is beyond doubt; None for any other: it takes the ordinary way."""
        if not self._context.service.pressure.is_known or any(name == b"transfer-encoding" for name, _ in headers):
            return None
        scope = {"method": METHOD.decode(), "path": URL.decode(), "headers": headers}
        try:
            check_right(scope, self._rule, self._keyring)
            size = declared_length(scope, self._rule)
            if size:
                self._context.service.pressure.admit(size)
        except (RefusedError, FullError):
            return None
        return size or None

    def arrival(self) -> Arrival:
        """For a body that comes while its first groups are stored."""
        return self._context.service.arrival()

    def pushing(self, body: Body, arrival: Arrival | None = None) -> Steps[bytes]:
        """Store the groups of a body; returns the answer's body. Raises: as `BufferService.push`."""
        fates = yield from self._context.service.pushing(body, arrival)
        return json.dumps({"groups": fates}, separators=(",", ":")).encode()

    def stored(self, begun: float) -> None:
        """A push that began at `begun` is answered: tell whoever waits for groups. Call from the event loop."""
        self._context.groups.wake()
        self._metrics.took(OPERATION, time.perf_counter() - begun)

    def refusal(self, error: BapoError) -> Response:
        """What the app would answer."""
        return error_response(error, self._metrics)


class PushCycle:
    """One push on its way; stands where uvicorn has its RequestResponseCycle, with the attributes that it looks at."""

    def __init__(self, protocol: DirectProtocol, shortcut: PushShortcut, size: int) -> None:
        self.body = bytearray()
        self.more_body = True
        self.message_event = asyncio.Event()
        self.disconnected = self.response_complete = self.is_answered = False
        self.keep_alive = True
        self.expected_content_length = 0
        self._protocol, self._shortcut, self._size = protocol, shortcut, size
        self._begun = time.perf_counter()
        self._unsent = b""

    def begin(self) -> None:
        """All that came with the headers has been parsed."""
        direct, is_small = self._protocol.direct(self), self._size <= SMALL_BYTES
        if self.more_body and not (is_small and direct.take_rest(self._size)):
            self._go_on(self._arriving(direct))
            return
        steps = self._shortcut.pushing(self.body)
        if is_small:
            self._finish_soon(steps)
        else:
            self._go_on(in_thread(self._serve, steps))

    def _finish_soon(self, steps: Steps[bytes]) -> None:
        try:
            done = finish_soon(steps, PATIENCE_S)
        except Exception as error:  # noqa: BLE001 - uvicorn would close the connection, and send no answer
            self._end(error)
        else:
            if done is None:
                self._go_on(in_thread(self._serve, steps))
            else:
                self._unsent = self._answer(done[0])
                self._end()

    def _go_on(self, serving: Coroutine[Any, Any, None]) -> None:
        task = self._protocol.loop.create_task(self._ended_by(serving))
        task.add_done_callback(self._protocol.tasks.discard)
        self._protocol.tasks.add(task)

    def _arriving(self, direct: Direct) -> Coroutine[Any, Any, None]:
        arrival = self._shortcut.arrival()
        # Made here and now: it stops the event loop from reading.
        intake = Intake(
            direct, self._size, lambda body: self._serve(self._shortcut.pushing(body, arrival)), watcher=arrival
        )
        return _read(intake, arrival)

    async def _ended_by(self, serving: Coroutine[Any, Any, None]) -> None:
        try:
            await serving
        except Exception as error:  # noqa: BLE001 - as above
            self._end(error)
        else:
            self._end()

    def _serve(self, steps: Steps[bytes]) -> None:
        """In a worker thread: the sender has its answer before the event loop hears of it."""
        self._unsent = self._answer(finish(steps))
        direct = self._protocol.direct(self)
        if not direct.is_open or direct.has_unsent:
            return
        try:
            with direct.descriptor() as descriptor:
                sent = os.write(descriptor, self._unsent)
        except OSError:  # it takes nothing now, or has gone: the event loop's business
            return
        self._unsent = self._unsent[sent:]
        self.is_answered = not self._unsent

    def _answer(self, body: bytes) -> bytes:
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
        return self._protocol.direct(self).head(200, headers) + body

    def _end(self, error: Exception | None = None) -> None:
        if self.response_complete:
            return
        self.response_complete = True
        if error is None:
            self._shortcut.stored(self._begun)
        else:
            self._unsent = self._refusal(error)
        if self._unsent and not self.disconnected:
            self._protocol.transport.write(self._unsent)
        if not self.keep_alive:
            self._protocol.transport.close()
        self._protocol.on_response_complete()

    def _refusal(self, error: Exception) -> bytes:
        if isinstance(error, BapoError):
            response = self._shortcut.refusal(error)
        else:
            log.error("a push failed", exc_info=error)
            response = Response("Internal Server Error", status_code=500, headers={"Connection": "close"})
        headers = [pair for pair in response.raw_headers if pair[0].lower() != b"connection"]
        self.keep_alive = len(headers) == len(response.raw_headers)
        return self._protocol.direct(self).head(response.status_code, headers) + bytes(response.body)

    def end_answered(self) -> None:
        """A worker thread has answered, and the sender goes on before the event loop has heard of it."""
        if self.is_answered and not self.more_body:
            self._end()


async def _read(intake: Intake[None], arrival: Arrival) -> None:
    try:
        await intake.run()
    except Exception:  # not when it is cancelled, at the end of the server: a thread may be using the arrival
        await in_thread(arrival.give_up)
        raise
