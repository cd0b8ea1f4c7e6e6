"""Frames over HTTP, one at a time, for clients that cannot reach Redis; and Redis access for those that can."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Send

from bapo.core.errors import ContractError, UnavailableError
from bapo.runtime.auth.api_tokens import Role
from bapo.transport.http_guard import ROLE, allow
from buffer_service.http.context import Here
from buffer_service.http.schemas import AccessAnswer, FrameName, Name
from buffer_service.service import Frames

log = logging.getLogger(__name__)
router = APIRouter(tags=["frames"])

MAX_FRAME_BYTES = 64 << 20

OCTETS = "application/octet-stream"
BINARY = {OCTETS: {"schema": {"type": "string", "format": "binary"}}}


@router.get("/frame-access")
@allow(Role.WORKER, Role.LEARNER)
def access(here: Here, request: Request) -> AccessAnswer:
    """Return the Redis URL and credentials for the caller, as far as `buffer.direct` and its role allow."""
    role = request.scope.get(ROLE)
    if here.access is None or not here.config.buffer.direct:
        return AccessAnswer()
    may_write, may_read = role in (None, Role.OPERATOR, Role.WORKER), role in (None, Role.OPERATOR, Role.LEARNER)
    return AccessAnswer(
        url=here.access.url,
        write=here.access.writer() if may_write else None,
        read=here.access.reader() if may_read else None,
    )


@router.put("/frames/{name}", status_code=204)
@allow(Role.WORKER, most_bytes=MAX_FRAME_BYTES, needs_length=True)
def put_frame(name: FrameName, here: Here, body: Annotated[bytes, Body(media_type=OCTETS)]) -> None:
    """Store a frame for ten minutes, or until the push that references it."""
    here.service.store.put_frame(name, body)


@router.get("/frames/{group_id}", response_class=Response, responses={200: {"content": BINARY}})
@allow(Role.LEARNER)
def frame(group_id: Name, here: Here) -> Response:
    """Return the frame of a stored group, without checking its content."""
    (found,) = here.service.store.frames([group_id])
    if found is None:
        raise ContractError(f"group {group_id} is not in the buffer")
    return Response(found, media_type=OCTETS)


def stream(frames: Frames) -> Response:
    """Stream frames. The first are read here, so that an unavailable store is an error, not a truncated body."""
    first = next(frames, [])

    def pieces() -> Frames:
        yield first
        yield from frames

    return CutStream((b"".join(some) for some in pieces()), media_type=OCTETS)


class CutStream(StreamingResponse):
    """A body that ends without its last chunk if the store becomes unavailable, so that its reader retries."""

    async def stream_response(self, send: Send) -> None:
        """As StreamingResponse, but logs one line instead of a traceback: it is too late for a 503."""
        try:
            await super().stream_response(send)
        except UnavailableError as error:
            log.warning("response truncated, its reader will retry: %s", error)
