"""What routes share: the service, who may reach its Redis, and what long polls wait for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request

from bapo.config.tree import Config
from buffer_service.http.long_poll import Wakeups
from buffer_service.service import BufferService
from buffer_service.store.redis.frame_access import FrameAccess


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One app's parts."""

    service: BufferService
    config: Config
    access: FrameAccess | None = None
    """None: all frames go through this service."""
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
