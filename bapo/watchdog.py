"""A run that stands still says so, once, and who waits for whom: no wait of any part is silent for ever.

    MOVES --nothing has changed for `supervision.stall_s`, one sentence--> STILL --something changes, one more--> MOVES

The launcher watches a run on one machine; the scheduler watches any run, and shows `bapo_stalled_seconds`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from bapo.config.supervision import SupervisionConfig
from bapo.errors import DeadlineError
from bapo.messages import BufferStatus


class Watchdog:
    """Compares marks of progress: whatever changes when, and only when, the run has moved."""

    def __init__(self, settings: SupervisionConfig, *, now: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._now = settings, now
        self._mark: Hashable = None
        self._moved_s = now()
        self._is_still = False

    @property
    def still_s(self) -> float:
        """Seconds since something moved."""
        return self._now() - self._moved_s

    def look(self, mark: Hashable, why: Callable[[], str]) -> str | None:
        """A sentence when a standstill begins or ends, else None.

        Args:
            why: says who waits for whom; called once per standstill.
        Raises: DeadlineError with the sentence when a standstill begins and is to end the run.
        """
        still_s = self.still_s
        if mark != self._mark:
            was_still, self._is_still = self._is_still, False
            self._mark, self._moved_s = mark, self._now()
            return f"the run moves again, after {still_s:.0f} s" if was_still else None
        if self._is_still or not self._settings.stall_s or still_s < self._settings.stall_s:
            return None
        self._is_still = True
        sentence = f"nothing has moved for {still_s:.0f} s (supervision.stall_s): {why()}"
        if self._settings.stall_ends_run:
            raise DeadlineError(sentence)
        return sentence


def mark_of(status: BufferStatus) -> Hashable:
    """What moves in a buffer. Leases and failures are left out: they come and go while nothing gets done."""
    return (
        status.step,
        status.policy_version,
        status.assembled_step,
        status.committed_step,
        status.checkpointed_step,
        status.cursor,
        status.fresh_ready,
        status.reevaluated_ready,
        tuple(sorted(status.evaluations.items())),
        tuple(sorted(status.reevaluation_rounds.items())),
    )
