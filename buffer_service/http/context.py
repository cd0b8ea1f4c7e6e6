"""What routes share: the service, access to its Redis, and the events of long polls."""

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
    """The components of one app."""

    service: BufferService
    config: Config
    access: FrameAccess | None = None
    """None: all frames are transferred through this service."""
    work: Wakeups = field(default_factory=Wakeups)
    """Set when a request may have become claimable."""
    groups: Wakeups = field(default_factory=Wakeups)
    """Set when a batch may have become ready."""
    progress: Wakeups = field(default_factory=Wakeups)
    """Set when the learner may have progressed."""

    def close(self) -> None:
        """End all long polls: the server is about to stop."""
        self.work.close()
        self.groups.close()
        self.progress.close()


async def context_of(request: Request) -> Context:  # async: FastAPI calls any other dependency in a thread
    """The context of the app that serves this request."""
    return cast(Context, request.app.state.context)


Here = Annotated[Context, Depends(context_of)]
