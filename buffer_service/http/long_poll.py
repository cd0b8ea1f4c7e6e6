"""Long polls: try, sleep until an event, retry until a deadline, without occupying a thread.

A change in this process wakes a poll immediately; changes through another instance and expired leases are seen within
POLL_S. A poll ends early if its client disconnects or the server shuts down.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import ParamSpec, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

P = ParamSpec("P")
T = TypeVar("T")

POLL_S = 0.25


async def in_thread(function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """Call a blocking function in a thread. Shutdown does not wait for it, since Redis may hang."""
    return await run_sync(partial(function, *args, **keywords), abandon_on_cancel=True)


async def aside(function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """Call a function that never waits for Redis in a thread pool of its own."""
    return await run_sync(partial(function, *args, **keywords), limiter=CapacityLimiter(1))


class Wakeups:
    """The event that one kind of long poll waits for."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._polling: Counter[str] = Counter()
        self._interrupted: set[str] = set()
        self.is_closed = False

    def wake(self) -> None:
        """Wake all open polls. Call from the event loop."""
        self._event.set()
        self._event = asyncio.Event()

    def interrupt(self, caller: str) -> None:
        """End the open polls of one caller, so that it polls again. Call from the event loop."""
        if caller in self._polling:
            self._interrupted.add(caller)
            self.wake()

    def close(self) -> None:
        """End all open polls now, and later ones after one attempt. Call from the event loop."""
        self.is_closed = True
        self.wake()

    async def poll(
        self,
        attempt: Callable[[], T | None],
        *,
        wait_s: float,
        is_gone: Callable[[], Awaitable[bool]],
        is_worth: Callable[[], bool] = lambda: True,
        caller: str = "",
    ) -> T | None:
        """The first result of `attempt` that is not None; None after `wait_s`.

        Args:
            attempt: blocking function; runs in a worker thread.
            is_gone: whether the caller has disconnected.
            is_worth: whether the event can change the result of the attempt.
            caller: name for `interrupt`.
        """
        self._polling[caller] += 1
        try:
            return await self._poll(attempt, time.monotonic() + wait_s, is_gone, is_worth, caller)
        finally:
            self._polling[caller] -= 1
            if not self._polling[caller]:
                del self._polling[caller]
                self._interrupted.discard(caller)

    async def _poll(
        self,
        attempt: Callable[[], T | None],
        deadline: float,
        is_gone: Callable[[], Awaitable[bool]],
        is_worth: Callable[[], bool],
        caller: str,
    ) -> T | None:
        # Check before each attempt, including the first: a call may arrive late after a network or process stall.
        while not await is_gone():
            event = self._event  # before the attempt, so that a change during it is not missed
            result = await in_thread(attempt)
            left_s = deadline - time.monotonic()
            is_over = left_s <= 0 or self.is_closed or caller in self._interrupted
            if result is not None or is_over:
                return result
            await self._news(event, min(POLL_S, left_s), lambda: caller in self._interrupted or is_worth())
        return None

    async def _news(self, event: asyncio.Event, most_s: float, is_worth: Callable[[], bool]) -> None:
        until = time.monotonic() + most_s
        while (left_s := until - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(event.wait(), left_s)
            except TimeoutError:
                return
            event = self._event  # before the check, so that a later change is not missed
            if self.is_closed or is_worth():
                return
