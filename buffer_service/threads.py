"""The worker threads of one service process: whatever blocks runs here.

Neither anyio's nor concurrent.futures': their hand-over to a thread and back costs more than the check of a group, and
a small push is little more than that. Here a job is one put into a queue and one callback on the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MOST_THREADS = 40
"""Each holds at most one connection to Redis."""


@dataclass(frozen=True, slots=True)
class _Job:
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]
    call: Callable[[], Any]

    def run(self) -> None:
        """In a worker thread."""
        try:
            result = self.call()
        except BaseException as error:  # noqa: BLE001 - it is raised where the job is awaited
            self._tell(self.answer.set_exception, error)
            del self  # it has the error, whose frames go on to this one: a circle, which holds all that they hold
        else:
            self._tell(self.answer.set_result, result)

    def _tell(self, settle: Callable[[Any], None], value: Any) -> None:
        def settle_once() -> None:
            if not self.answer.done():  # it may have been cancelled
                settle(value)

        try:
            self.loop.call_soon_threadsafe(settle_once)
        except RuntimeError:
            if not self.loop.is_closed():  # nobody waits any more when it is
                raise


class _Threads:
    """As many threads as there were jobs at one time, up to a limit; they end with the process."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._lock = threading.Lock()
        self._started = self._busy = 0

    def put(self, job: _Job) -> None:
        """Have a thread run it."""
        with self._lock:
            self._busy += 1
            starts = self._busy > self._started and self._started < self._most
            self._started += starts
        if starts:
            threading.Thread(target=self._work, name=f"buffer-{self._started}", daemon=True).start()
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            job.run()
            del job  # or its frames stay until the next one
            with self._lock:
                self._busy -= 1


_threads = _Threads(MOST_THREADS)
_aside = _Threads(1)


async def in_thread(function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """Call a function that blocks."""
    return await _in(_threads, function, *args, **keywords)


async def aside(function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """Call a function that takes its time and never waits for Redis, and so does not wait for those that do."""
    return await _in(_aside, function, *args, **keywords)


async def _in(threads: _Threads, function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    threads.put(_Job(loop, answer, partial(function, *args, **keywords)))
    try:
        return await answer
    finally:
        del answer  # as above
