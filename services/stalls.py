"""Stall detection: a stalled run is reported once, with what it is blocked on.

    RUNNING --no change for `supervision.stall_s`: message--> STALLED --a change: message--> RUNNING

The launcher watches a run on one machine; the scheduler watches any run, and exports `bapo_stalled_seconds`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from bapo.config.tree import SupervisionConfig
from bapo.core.errors import DeadlineError
from bapo.core.types import Purpose
from bapo.transport.messages import BufferStatus


class Watchdog:
    """Compares progress marks, which change if and only if the run makes progress."""

    def __init__(self, settings: SupervisionConfig, *, now: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._now = settings, now
        self._mark: Hashable = None
        self._moved_s = now()
        self._is_still = False

    @property
    def stalled_s(self) -> float:
        return self._now() - self._moved_s

    def poll(self, mark: Hashable, why: Callable[[], str]) -> str | None:
        """A message when a stall begins or ends, else None.

        Args:
            why: what the run is blocked on; called once per stall.
        Raises: DeadlineError with the message if a stall is configured to end the run.
        """
        stalled_s = self.stalled_s
        if mark != self._mark:
            was_still, self._is_still = self._is_still, False
            self._mark, self._moved_s = mark, self._now()
            return f"the run is making progress again after {stalled_s:.0f} s" if was_still else None
        if self._is_still or not self._settings.stall_s or stalled_s < self._settings.stall_s:
            return None
        self._is_still = True
        sentence = f"no progress for {stalled_s:.0f} s (supervision.stall_s): {why()}"
        if self._settings.stall_ends_run:
            raise DeadlineError(sentence)
        return sentence


def mark_of(status: BufferStatus) -> Hashable:
    """Progress mark of a buffer. Excludes leases and failures, which change without progress."""
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


SILENT_S = 10.0
"""Seconds after which a silent worker is reported."""


def blocked_on(status: BufferStatus, batch_size: int, num_steps: int) -> str:
    """What the run is blocked on right now."""
    if status.step == 0:
        return _before_the_learner(status)
    if status.has_ended(num_steps):
        return _evaluation_left(status)
    if status.assembled_step < status.step:
        # A loop that reports other step numbers still waits for the next batch.
        return f"learner is waiting for batch {status.assembled_step + 1}: {_missing(status, batch_size)}"
    leased = sum(status.leased.values())
    if leased:
        return f"the learner is training step {status.step}, the workers are sampling {leased} groups"
    is_trained = status.committed_step >= status.step
    learner = (
        f"the learner has trained step {status.step}" if is_trained else f"the learner is training step {status.step}"
    )
    if status.queued.get(Purpose.FRESH.value, 0) > 0:
        return f"workers are waiting for weights newer than version {status.policy_version}; {learner}"
    return f"workers are idle: {status.fresh_ready} fresh groups are ready, the maximum ahead; {learner}"


def _before_the_learner(status: BufferStatus) -> str:
    queued, leased = sum(status.queued.values()), sum(status.leased.values())
    held_up = [f"{queued} requests are queued and no worker has claimed one"] if queued and not leased else []
    held_up += _silent(status)
    if held_up:
        return f"{', '.join(held_up)}; no learner has reported a step"
    return "workers are sampling ahead; the learner has not started"


def _missing(status: BufferStatus, batch_size: int) -> str:
    parts = [status.demand] if status.demand else []
    parts += [f"{min(status.fresh_ready, batch_size)}/{batch_size} fresh groups"]
    rounds = sum(status.reevaluation_rounds.values())
    if rounds:
        parts.append(f"{rounds} re-evaluations open")
    evaluate = status.num_open(Purpose.EVALUATE)
    if evaluate:
        parts.append(f"{evaluate} evaluations have priority")
    parts += _silent(status)
    if not sum(status.leased.values()) and (queued := status.queued.get(Purpose.FRESH.value, 0)):
        parts.append(f"{queued} queued, no worker has claimed one")
    if status.failures_in_a_row:
        parts.append(f"{status.failures_in_a_row} groups failed in a row: {status.last_failure}")
    if len(parts) == 1 and not sum(status.queued.values()) + sum(status.leased.values()):
        parts.append(_nothing_open(is_filled=status.fresh_ready >= batch_size))
    return ", ".join(parts)


def _nothing_open(*, is_filled: bool) -> str:
    """No worker samples and nothing has failed: the scheduler or learner has not sent its next request."""
    if not is_filled:
        return "nothing is requested: is the scheduler running?"
    return "no open requests: the scheduler has a round to issue, or the learner has not requested its batch"


def _silent(status: BufferStatus) -> list[str]:
    return [
        f"{name} silent for {worker.silent_s:.0f} s"
        for name, worker in sorted(status.workers.items())
        if worker.silent_s > SILENT_S
    ]


def _evaluation_left(status: BufferStatus) -> str:
    left = status.num_open(Purpose.EVALUATE)
    return f"training is done; {left} held-out prompts are left to measure"
