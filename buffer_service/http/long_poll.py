"""Long polls: try, sleep until something happens, try again - without a thread, until a deadline.

A change in this process wakes at once; a change through another instance, or a lease that ends, is seen after POLL_S.
A poll ends early when its client has gone or the server closes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import ParamSpec, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

P = ParamSpec("P")
T = TypeVar("T")

POLL_S = 0.25


async def in_thread(function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """Call a function that blocks. A server that ends does not wait for it, since Redis may hang."""
    return await run_sync(partial(function, *args, **keywords), abandon_on_cancel=True)


async def aside(function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """Call a function that never waits for Redis, and so does not wait for those that do."""
    return await run_sync(partial(function, *args, **keywords), limiter=CapacityLimiter(1))


class Wakeups:
    """What one kind of long poll waits for."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._interruptions = 0
        self.is_closed = False

    def wake(self) -> None:
        """Something happened. Call from the event loop."""
        self._event.set()
        self._event = asyncio.Event()

    def interrupt(self) -> None:
        """End the open polls after one more try, so that their callers poll again. Call from the event loop."""
        self._interruptions += 1
        self.wake()

    def close(self) -> None:
        """End all polls now, and all later ones after one try. Call from the event loop."""
        self.is_closed = True
        self.wake()

    async def poll(
        self,
        attempt: Callable[[], T | None],
        *,
        wait_s: float,
        is_gone: Callable[[], Awaitable[bool]],
        is_worth: Callable[[], bool] = lambda: True,
    ) -> T | None:
        """The first result of `attempt` that is not None; None after `wait_s`.

        Args:
            attempt: blocks; runs in a worker thread.
            is_gone: whether the caller has left.
            is_worth: whether what has happened can make a difference to the attempt.
        """
        deadline, interruptions = time.monotonic() + wait_s, self._interruptions
        # Before each attempt, also the first: a call may come late, from a link that was frozen, or a service that was.
        while not await is_gone():
            event = self._event  # before the attempt, so that a change during it is not missed
            result = await in_thread(attempt)
            left_s = deadline - time.monotonic()
            is_over = left_s <= 0 or self.is_closed or self._interruptions != interruptions
            if result is not None or is_over:
                return result
            await self._news(event, min(POLL_S, left_s), lambda: self._interruptions != interruptions or is_worth())
        return None

    async def _news(self, event: asyncio.Event, most_s: float, is_worth: Callable[[], bool]) -> None:
        until = time.monotonic() + most_s
        while (left_s := until - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(event.wait(), left_s)
            except TimeoutError:
                return
            event = self._event  # before the question, so that a later change is not missed
            if self.is_closed or is_worth():
                return
