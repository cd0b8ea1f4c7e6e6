"""Average samples of a run, one per second, into one `Observation` for the autoscaling rule. Pure.

    learner waits      it has started a step that has no batch yet
    room of a worker   `rollout.max_groups_in_flight`; further groups are claimed ahead
    rates              per second of work: idle time of the learner and the workers is excluded

Each sample represents the time since the previous one, so shares of time are unbiased even for steps below a second.
Held-out groups use the same workers: the share of their requests is excluded from the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bapo.algorithms.composers.registry import load_composer
from bapo.config.tree import Config
from bapo.core.types import Purpose
from bapo.transport.messages import BufferStatus
from bapo.transport.rollout_client import WorkerStatus
from rollout_server.autoscaling.rule import Observation

LONGEST_WINDOWS = 8
"""A window without a weight update lasts at most this many times `window_s`."""
MIN_WORK = 0.02
"""Share of the time below which a rate per second of work is noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One sample."""

    time_s: float
    wanted: int
    workers: Sequence[WorkerStatus]
    stored: int
    """Counter of the fresh groups that the buffer has stored from this fleet."""
    stale: int
    """Counter of the stale fresh groups."""
    elsewhere: int = 0
    """Workers of the run's other rollout servers."""
    status: BufferStatus


class Window:
    """The samples from one decision to the next."""

    def __init__(self, config: Config, first: Moment) -> None:
        self._config = config
        self._first = self._last = first
        self._waited_s = self._full_s = self._room_s = self._fresh_work_s = 0.0
        self._waited_full_s = self._waited_room_s = 0.0

    def add(self, sample: Moment) -> None:
        """Add a sample."""
        seconds = sample.time_s - self._last.time_s
        self._last = sample
        waits = sample.status.step > sample.status.assembled_step
        self._waited_s += seconds * waits
        room = self._config.rollout.max_groups_in_flight
        ready = [worker for worker in sample.workers if worker.state == "ready"]
        full = sum(min(1.0, worker.inflight / room) for worker in ready)
        self._room_s += len(ready) * seconds
        self._waited_full_s += full * seconds * waits
        self._waited_room_s += len(ready) * seconds * waits
        self._full_s += full * seconds
        self._fresh_work_s += full * seconds * _share_for_training(sample.status)

    @property
    def is_over(self) -> bool:
        """Whether it has lasted `window_s` and contains a weight update, or is at its limit."""
        lasted_s = self._last.time_s - self._first.time_s
        least_s = self._config.autoscaling.window_s
        if lasted_s >= LONGEST_WINDOWS * least_s:
            return True
        return lasted_s >= least_s and self._last.status.policy_version > self._first.status.policy_version

    def observation(self) -> Observation:
        """The averages; None for what could not be measured."""
        first, last = self._first, self._last
        lasted_s = last.time_s - first.time_s
        trained_s = lasted_s - self._waited_s
        taken = _taken(self._config, first.status.assembled_step, last.status.assembled_step)
        made = last.stored - first.stored
        stale = last.stale - first.stale
        ready = [worker for worker in last.workers if worker.state == "ready"]
        versions = [worker.policy_version for worker in ready]
        can_say = self._room_s > 0
        return Observation(
            wanted=last.wanted,
            ready=len(ready) + last.elsewhere,
            wait_share=self._waited_s / lasted_s if lasted_s > 0 else None,
            idle_share=1 - self._full_s / self._room_s if can_say else None,
            ready_batches=last.status.fresh_ready / self._config.algorithm.batch_size,
            consume_rate=taken / max(trained_s, MIN_WORK * lasted_s) if taken else None,
            produce_rate=made / self._fresh_work_s if made and self._fresh_work_s > MIN_WORK * self._room_s else None,
            stale_share=stale / (made + stale) if made + stale else 0.0,
            version_lag=max(0, last.status.step - min(versions)) if versions else None,
            spare_share=1 - self._waited_full_s / self._waited_room_s if self._waited_room_s else 0.0,
            lag_bound=self._config.cadence.max_staleness,
        )


def trains(config: Config, status: BufferStatus) -> bool:
    """Whether the learner is in one of its steps."""
    return 1 <= status.step <= config.run.num_steps


def _taken(config: Config, before: int, now: int) -> int:
    schedule = load_composer(config.algorithm).fresh_schedule
    return schedule.up_to(now) - schedule.up_to(before)


def _share_for_training(status: BufferStatus) -> float:
    held = sum(status.leased.values())
    return 1 - status.leased.get(Purpose.EVALUATE.value, 0) / held if held else 1.0
