"""What routes share: the service, the two things that long polls wait for, and how a request body is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request

from bapo.config.tree import Config
from bapo.errors import ContractError
from buffer_service.service import BufferService
from buffer_service.waiting import Wakeups

MOST_PUSH_BYTES = 64 << 20
MOST_RESTORE_BYTES = 16 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One app's parts."""

    service: BufferService
    config: Config
    work: Wakeups = field(default_factory=Wakeups)
    """A request may have become claimable."""
    groups: Wakeups = field(default_factory=Wakeups)
    """A batch may have become ready."""

    def close(self) -> None:
        """End all long polls: the server is about to stop."""
        self.work.close()
        self.groups.close()


async def _context(request: Request) -> Context:  # async: FastAPI calls any other dependency in a thread
    return cast(Context, request.app.state.context)


Here = Annotated[Context, Depends(_context)]


class BodyError(ContractError):
    """A body was refused before its end: what follows on the connection is no request, so it is closed."""


async def read_body(request: Request, most_bytes: int) -> bytearray:
    """The whole body, read into one block of the declared length.

    Raises: BodyError when the length is not declared, is not what comes, or is more than `most_bytes`.
    """
    declared = request.headers.get("content-length", "")
    if not declared.isdigit():
        raise BodyError("the length of the body must be declared: send Content-Length, not chunks")
    size = int(declared)
    if size > most_bytes:
        raise BodyError(f"a body of {size} bytes is more than the {most_bytes} that are taken: send it in parts")
    body, end = bytearray(size), 0
    async for chunk in request.stream():
        if end + len(chunk) > size:
            raise BodyError(f"the body is longer than the declared {size} bytes")
        body[end : end + len(chunk)] = chunk
        end += len(chunk)
    if end != size:
        raise BodyError(f"the body is cut off: {end} of {size} bytes")
    return body
