"""A look at something that may hang, for a caller who must answer soon."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedLook(Generic[T]):
    """One look at a time, in a thread of its own: who asks while one hangs waits for that one, and holds no thread.

    Not in a worker thread of the service: while Redis hangs, calls that wait for it have all of those.
    """

    def __init__(self, look: Callable[[], T], patience_s: float) -> None:
        """`patience_s`: how long a caller waits."""
        self._look, self._patience_s = look, patience_s
        self._lock = threading.Lock()
        self._newest: Future[T] | None = None

    async def soon(self) -> T:
        """What the look gives, or raises. Raises: TimeoutError when it takes too long."""
        return await asyncio.wait_for(asyncio.wrap_future(self._begun()), self._patience_s)

    def _begun(self) -> Future[T]:
        with self._lock:
            newest = self._newest
            if newest is None or newest.done():
                newest = self._newest = Future()
                newest.set_running_or_notify_cancel()  # a caller that gives up cancels it for nobody
                threading.Thread(target=self._settle, args=(newest,), name="look", daemon=True).start()
        return newest

    def _settle(self, future: Future[T]) -> None:
        try:
            found = self._look()
        except BaseException as error:  # noqa: BLE001 - it is raised for who waits
            future.set_exception(error)
        else:
            future.set_result(found)
