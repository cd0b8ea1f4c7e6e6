"""What routes share: the service, the two things that long polls wait for, and what is asked before a body is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request

from bapo.config.tree import Config
from buffer_service.service import BufferService
from buffer_service.threads import in_thread
from buffer_service.waiting import Wakeups


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One app's parts."""

    service: BufferService
    config: Config
    work: Wakeups = field(default_factory=Wakeups)
    """A request may have become claimable."""
    groups: Wakeups = field(default_factory=Wakeups)
    """A batch may have become ready."""
    progress: Wakeups = field(default_factory=Wakeups)
    """The learner may have moved."""

    def close(self) -> None:
        """End all long polls: the server is about to stop."""
        self.work.close()
        self.groups.close()
        self.progress.close()


async def context_of(request: Request) -> Context:  # async: FastAPI calls any other dependency in a thread
    """Of the app that answers this request."""
    return cast(Context, request.app.state.context)


Here = Annotated[Context, Depends(context_of)]


async def admit(request: Request, service: BufferService) -> None:
    """Before the body of a push with fresh groups is read. Raises: FullError; what follows is skipped by the server."""
    pressure = service.pressure
    if not pressure.is_known:
        await in_thread(pressure.look)
    declared = request.headers.get("content-length", "")
    pressure.admit(int(declared) if declared.isdecimal() else 0)
