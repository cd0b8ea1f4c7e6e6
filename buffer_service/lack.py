"""What the next batch lacks: so that those who wait for it look at Redis when a look may find it, not at every push.

With four ranks that wait and 160 pushes a second that would be 640 looks, each of them two changes of threads and a
script. What other instances of the service store is not seen here, so now and then a look is due anyway.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

LOOK_EVERY_S = 0.05
"""A push that comes so long after a look is worth another one."""


@dataclass(frozen=True, slots=True)
class _Shortage:
    step: int
    until: int
    """So many groups must have been stored here before the batch can be complete, if nobody else stores any."""
    at: float


class Lack:
    """Of one service process. Thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._shortage: _Shortage | None = None
        self.stored = 0
        """Fresh groups that this process has stored. Read before a look at the store, and given to `found`."""

    def took(self, num_fresh: int) -> None:
        """So many fresh groups were stored."""
        with self._lock:
            self.stored += num_fresh

    def found(self, step: int, missing: int, stored: int) -> None:
        """A look found that the batch of `step` misses so many fresh groups; `stored` is from before the look."""
        self._shortage = _Shortage(step, stored + missing, self._now())

    def forget(self) -> None:
        """The state was replaced."""
        self._shortage = None

    def may_be_over(self, step: int) -> bool:
        """Whether a look may find the batch of `step`."""
        shortage = self._shortage
        if shortage is None or shortage.step != step or self.stored >= shortage.until:
            return True
        return self._now() - shortage.at >= LOOK_EVERY_S
