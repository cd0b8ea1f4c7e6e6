"""One learner, workers, a buffer and the autoscaling rule as a simulation of discrete events; no wall clock, no I/O.

    request --worker (room for some groups at once)--> fresh group --B of them--> batch --learner--> step
       ^                                                                                  |
       +---- requests of steps up to t + v + max_steps_ahead, sampled by weights that they admit <---+

The unit costs are measured ones (`MEASURED`); the rule is the one that the rollout server runs, on the same windows.
A worker takes `start_s` to start; one that is scaled away finishes what it has. Groups take exponential times around
their mean, which stands for responses of different length; a worker samples all its groups side by side.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from bapo.config.autoscaling import AutoscalingConfig
from rollout_server.autoscaling.rule import Observation, State, decide


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of one run on given machines."""

    learner_step_s: float
    """Training of one batch."""
    group_s: float
    """Sampling, grading and pushing one group, in a worker whose room is full."""
    start_s: float
    """From the wish for a worker until it samples."""
    sync_s: float
    """One weight update."""


DRIFT_S = 20.0
ROOM = 12
MEASURED = Costs(learner_step_s=0.346, group_s=ROOM * 0.546 / 32, start_s=14.0, sync_s=0.044)
"""docs/results.md: 346 ms of training per step of 32 groups; 546 ms of engine for them, so that with a room of 12 a
group is in the engine for 12 * 0.546 / 32 = 0.205 s; 14 s for an engine on a warm machine; 44 ms per weight update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is simulated."""

    costs: Costs = MEASURED
    batch_size: int = 32
    v: int = 2
    max_steps_ahead: int = 2
    room: int = ROOM
    num_workers: int = 1
    most_workers: int = 8
    seconds: float = 1200.0
    changes: Sequence[tuple[float, float, float]] = ()
    """(second, times longer groups, times longer steps): load that changes."""
    drift: float = 0.0
    """Every 20 s the length of responses is drawn anew, within this share of what it should be."""
    autoscaling: AutoscalingConfig | None = None
    """None: the number stays."""
    seed: int = 0


@dataclass(kw_only=True)
class Worker:
    """Starting until `ready_at`; leaving workers claim nothing more."""

    ready_at: float
    held: int = 0
    is_leaving: bool = False


@dataclass(kw_only=True)
class Point:
    """One second."""

    time_s: float
    desired: int
    ready: int
    learner_waits: float
    """Share of this second."""
    workers_idle: float
    """Share of the room of ready workers."""
    fresh_ready: int
    steps: int
    reason: str = ""


@dataclass(kw_only=True)
class _Window:
    began: float = 0.0
    waited: float = 0.0
    full: float = 0.0
    room: float = 0.0
    step: int = 0
    stored: int = 0
    waited_full: float = 0.0
    waited_room: float = 0.0
    version: int = 1


@dataclass(kw_only=True)
class Simulation:
    """Call `run` once."""

    setting: Setting
    points: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = Random(self.setting.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._now = 0.0
        self._step, self._version, self._synced = 1, 1, 0
        self._asked = self._stored = self._fresh = self._consumed = 0
        self._is_training = False
        self._waited = self._full = self._room = self._waited_full = self._waited_room = 0.0
        self._workers = [Worker(ready_at=0.0) for _ in range(self.setting.num_workers)]
        self._state, self._window, self._reason = State(), _Window(), ""
        self._last = (0.0, 0.0, 0.0)

    def run(self) -> list[Point]:
        """One point per second."""
        for second in range(1, int(self.setting.seconds) + 1):
            self._at(float(second), self._look)
        self._advance()
        while self._events:
            time_s, _, event = heapq.heappop(self._events)
            self._pass_until(time_s)
            event()
            self._advance()
            if time_s >= self.setting.seconds:
                break
        return self.points

    # -- load

    def _times(self) -> tuple[float, float]:
        groups, steps = 1.0, 1.0
        for since, longer_groups, longer_steps in self.setting.changes:
            if self._now >= since:
                groups, steps = longer_groups, longer_steps
        era = int(self._now // DRIFT_S)
        return groups * (1 + self.setting.drift * Random(f"{self.setting.seed}/{era}").uniform(-1, 1)), steps

    # -- the parts

    def _advance(self) -> None:
        self._begin_step()
        self._claim()

    def _begin_step(self) -> None:
        setting = self.setting
        if self._is_training or self._fresh < setting.batch_size:
            return
        self._fresh -= setting.batch_size
        self._consumed += setting.batch_size
        self._is_training = True
        self._at(self._now + setting.costs.learner_step_s * self._times()[1], self._end_step)

    def _end_step(self) -> None:
        self._step += 1
        if self._step % self.setting.v == 0:
            self._at(self._now + self.setting.costs.sync_s, self._end_sync)
        else:
            self._is_training = False

    def _end_sync(self) -> None:
        self._version = self._step
        self._is_training = False

    def _claim(self) -> None:
        setting = self.setting
        # A request of step h takes weights of step h - max_steps_ahead, rounded down to an update, or newer ones.
        last_step = self._version + setting.v - 1 + setting.max_steps_ahead
        open_until = last_step * setting.batch_size
        for worker in sorted(self._ready(), key=lambda worker: worker.held):
            while not worker.is_leaving and worker.held < setting.room and self._asked < open_until:
                self._asked += 1
                worker.held += 1
                mean = setting.costs.group_s * self._times()[0]
                self._at(self._now + self._random.expovariate(1 / mean), lambda worker=worker: self._store(worker))

    def _store(self, worker: Worker) -> None:
        worker.held -= 1
        self._stored += 1
        self._fresh += 1
        if worker.is_leaving and worker.held == 0:
            self._workers.remove(worker)

    def _ready(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.ready_at <= self._now]

    # -- the rule

    def _look(self) -> None:
        ready = [worker for worker in self._ready() if not worker.is_leaving]
        waited, full, room = self._last
        seconds = 1.0
        self.points.append(
            Point(
                time_s=self._now,
                desired=sum(not worker.is_leaving for worker in self._workers),
                ready=len(ready),
                learner_waits=(self._waited - waited) / seconds,
                workers_idle=1 - (self._full - full) / (self._room - room) if self._room > room else 0.0,
                fresh_ready=self._fresh,
                steps=self._step - 1,
                reason=self._reason,
            )
        )
        self._last = (self._waited, self._full, self._room)
        if self.setting.autoscaling is not None:
            self._scale(self.setting.autoscaling, ready)

    def _scale(self, settings: AutoscalingConfig, ready: list[Worker]) -> None:
        window, setting = self._window, self.setting
        lasted = self._now - window.began
        if lasted < settings.window_s or (self._version == window.version and lasted < 8 * settings.window_s):
            return
        waited, full, room = self._waited - window.waited, self._full - window.full, self._room - window.room
        waited_full, waited_room = self._waited_full - window.waited_full, self._waited_room - window.waited_room
        taken, made = self._consumed - window.step, self._stored - window.stored
        wanted = sum(not worker.is_leaving for worker in self._workers)
        seen = Observation(
            wanted=wanted,
            ready=len(ready),
            wait_share=waited / lasted,
            idle_share=1 - full / room if room else None,
            ready_batches=self._fresh / setting.batch_size,
            consume_rate=taken / max(lasted - waited, 0.02 * lasted) if taken else None,
            produce_rate=made / full if made and full > 0.02 * room else None,
            stale_share=0.0,
            version_lag=self._step - self._version,
            spare_share=1 - waited_full / waited_room if waited_room else 0.0,
            lag_bound=setting.v - 1 + setting.max_steps_ahead,
        )
        self._state, decision = decide(settings, setting.most_workers, self._state, seen, self._now)
        self._reason = decision.reason.value
        for _ in range(decision.desired - wanted):
            self._workers.append(Worker(ready_at=self._now + setting.costs.start_s))
            self._at(self._now + setting.costs.start_s, lambda: None)
        for worker in [worker for worker in self._workers if not worker.is_leaving][decision.desired :]:
            worker.is_leaving = True
            if worker.held == 0:
                self._workers.remove(worker)
        self._window = _Window(
            began=self._now, waited=self._waited, full=self._full, room=self._room, step=self._consumed,
            stored=self._stored, waited_full=self._waited_full, waited_room=self._waited_room, version=self._version,
        )  # fmt: skip

    # -- time

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (time_s, self._order, event))

    def _pass_until(self, time_s: float) -> None:
        seconds = time_s - self._now
        waits = not self._is_training
        self._waited += seconds * waits
        ready = [worker for worker in self._ready() if not worker.is_leaving]
        full = seconds * sum(worker.held for worker in ready) / self.setting.room
        room = seconds * len(ready)
        self._full, self._room = self._full + full, self._room + room
        self._waited_full, self._waited_room = self._waited_full + full * waits, self._waited_room + room * waits
        self._now = time_s


def shares(points: Sequence[Point], since: float, until: float) -> tuple[float, float, float]:
    """(learner waits, workers idle, mean number of ready workers) over a span of time."""
    span = [point for point in points if since < point.time_s <= until]
    number = len(span)
    return (
        sum(point.learner_waits for point in span) / number,
        sum(point.workers_idle for point in span) / number,
        sum(point.ready for point in span) / number,
    )


def changes_of(points: Sequence[Point]) -> int:
    """How often the desired number changed."""
    return sum(a.desired != b.desired for a, b in pairwise(points))
