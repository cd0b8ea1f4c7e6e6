"""How many rollout workers there should be: one pure function.

    need = c (1 + headroom) / p      c: groups/s that the learner takes while it does not wait
                                     p: groups/s that one worker makes while it has all the work that it can hold
    busy = ready (1 - idle) (1 + headroom)        workers that are really at work

Both are fractions of a worker. The number n stays while n is in the band

    ceil(need / (1 + hysteresis))  <=  n  <=  ceil(max(need, busy) (1 + hysteresis))

and otherwise becomes ceil(need), or ceil(max(need, busy)) on the way down. So a need that wanders by less than the
factor 1 + hysteresis does not move n to and fro. Within the band the queue decides, one worker at a time:

    learner waits, workers do not idle, less than a batch is ready    one more (then p was measured too high)
    learner does not wait, groups wait, n - 1 workers suffice         one fewer
    groups come back too old                                          one fewer

Workers that idle while the learner waits are not a reason for more: with max_steps_ahead = 0 both take turns. `busy`
keeps the rule from taking back what the queue asked for. Rates outlive a change of n, because they are per worker and
second of work; shares of time do not, because they describe the old n.

Does not cover: which worker leaves, and engines whose speed is far from proportional to what they hold: p is then
measured too high at low occupancy, and the queue's rule makes up for it one worker at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, model_validator

from bapo.algorithms.settings import MAX_SECONDS, Frozen


class Reason(StrEnum):
    """Why the desired number is what it is."""

    OFF = "off"
    BOUNDS = "bounds"
    """There are fewer or more than the bounds allow."""
    MISSING = "input_missing"
    MEASURING = "measuring"
    """One window is not enough to act on."""
    COOLDOWN = "cooldown"
    """A change is due, but the last one was just now."""
    STARTING = "workers_start"
    """More are needed, but some that were asked for are not ready yet."""
    WORK_LACKS = "work_lacks"
    """More are needed by the rates, but while the learner waits workers have empty room: requests or the time of one
    response are the limit. A larger `cadence.max_steps_ahead` helps, more workers do not."""
    WEIGHTS_LATE = "weights_late"
    """More are needed, but workers have older weights than requests admit: more of them would not help."""
    MATCHED = "matched"
    RATE_ABOVE = "rate_above"
    RATE_BELOW = "rate_below"
    LEARNER_WAITS = "learner_waits"
    GROUPS_WAIT = "groups_wait"
    GROUPS_STALE = "groups_stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One window of a run. None: could not be measured."""

    wanted: int
    """Workers that were asked for."""
    ready: int
    """Of these, the ones that sample."""
    wait_share: float | None
    """[0, 1] of the window's time, in which the learner had no batch."""
    idle_share: float | None
    """[0, 1] of the room of ready workers, that was empty."""
    ready_batches: float | None
    """Fresh groups that wait, over B, at the end of the window."""
    consume_rate: float | None
    """c: fresh groups per second that the learner took, per second that it did not wait."""
    produce_rate: float | None
    """p: fresh groups per second and worker, per second in which its room was full."""
    stale_share: float | None
    """[0, 1] of pushed groups that were too old."""
    version_lag: int | None
    """Steps between the learner and the oldest weights that a ready worker has."""
    spare_share: float
    """[0, 1] of the room of ready workers, that was empty while the learner waited; 0 if it did not wait."""
    lag_bound: int
    """Most steps that a request may admit (`cadence.max_staleness`)."""


INPUTS = (
    "wait_share",
    "idle_share",
    "ready_batches",
    "consume_rate",
    "produce_rate",
    "stale_share",
    "version_lag",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the rule remembers."""

    consume_rate: float | None = None
    produce_rate: float | None = None
    wait_share: float | None = None
    idle_share: float | None = None
    windows: int = 0
    """Since the number last changed."""
    changed_s: float | None = None
    """When it last changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the rule wants."""

    desired: int
    reason: Reason
    need: float | None = None
    """Workers, a real number; None while a rate is unknown."""
    missing: tuple[str, ...] = ()
    """Inputs that could not be measured."""


def decide(
    settings: AutoscalingConfig, most: int, state: State, seen: Observation, now_s: float
) -> tuple[State, Decision]:
    """The next number of workers, within [min_workers, most] whatever happens.

    Args:
        most: `max_workers`, or what the fleet can hold if that is null.
        now_s: of any clock that only rises.
    """
    state = _remember(settings, state, seen)
    number = min(max(seen.wanted, settings.min_workers), most)
    if number != seen.wanted:
        return _changed(state, now_s), Decision(desired=number, reason=Reason.BOUNDS, need=_need(settings, state))
    if missing := tuple(name for name in INPUTS if getattr(seen, name) is None):
        return state, Decision(desired=number, reason=Reason.MISSING, need=_need(settings, state), missing=missing)
    need = _need(settings, state)
    assert need is not None, "both rates are known"
    target, reason = _target(settings, state, seen, need)
    target = min(max(target, number - settings.max_down, settings.min_workers), number + settings.max_up, most)
    if held := _why_not(settings, state, seen, target, now_s):
        return state, Decision(desired=number, reason=held, need=need)
    if target == number:
        # Also when the bounds alone keep the number: then the reason says what is lacking.
        return state, Decision(desired=number, reason=reason, need=need)
    return _changed(state, now_s), Decision(desired=target, reason=reason, need=need)


def _remember(settings: AutoscalingConfig, state: State, seen: Observation) -> State:
    weight = 2 / (1 + settings.smoothing_windows)

    def average(old: float | None, new: float | None) -> float | None:
        if old is None or new is None:
            return old if new is None else new
        return old + weight * (new - old)

    return replace(
        state,
        consume_rate=average(state.consume_rate, seen.consume_rate),
        produce_rate=average(state.produce_rate, seen.produce_rate),
        wait_share=average(state.wait_share, seen.wait_share),
        idle_share=average(state.idle_share, seen.idle_share),
        windows=state.windows + 1,
    )


def _changed(state: State, now_s: float) -> State:
    return replace(state, wait_share=None, idle_share=None, windows=0, changed_s=now_s)


def _need(settings: AutoscalingConfig, state: State) -> float | None:
    if state.consume_rate is None or not state.produce_rate:
        return None
    return state.consume_rate * (1 + settings.headroom) / state.produce_rate


def _target(settings: AutoscalingConfig, state: State, seen: Observation, need: float) -> tuple[int, Reason]:
    """Before limits, cooldown and bounds. Monotone: more demand or waiting never gives a smaller number."""
    assert state.wait_share is not None
    assert state.idle_share is not None
    assert seen.ready_batches is not None
    assert seen.stale_share is not None
    number, band = seen.wanted, 1 + settings.hysteresis
    enough = max(need, seen.ready * (1 - state.idle_share) * (1 + settings.headroom))
    waits = state.wait_share >= settings.wait_threshold
    starved = waits and state.idle_share < settings.idle_threshold and seen.ready_batches < settings.ready_low
    stale = seen.stale_share > settings.stale_threshold
    if starved:
        if number < math.ceil(need / band):
            return math.ceil(need), Reason.RATE_ABOVE
        return number + 1, Reason.LEARNER_WAITS
    if stale:
        return min(number - 1, math.ceil(enough)), Reason.GROUPS_STALE
    if number < math.ceil(need / band):
        return math.ceil(need), Reason.RATE_ABOVE
    if number > math.ceil(enough * band):
        return math.ceil(enough), Reason.RATE_BELOW
    if not waits and seen.ready_batches >= settings.ready_high and math.ceil(enough) < number:
        return number - 1, Reason.GROUPS_WAIT
    return number, Reason.MATCHED


def _why_not(settings: AutoscalingConfig, state: State, seen: Observation, target: int, now_s: float) -> Reason | None:
    """What holds a change back; None when nothing does."""
    assert seen.version_lag is not None
    if target == seen.wanted:
        return None
    if state.windows < 2:
        return Reason.MEASURING
    if target > seen.wanted:
        if seen.ready < seen.wanted:
            return Reason.STARTING
        if seen.spare_share >= settings.spare_threshold:
            return Reason.WORK_LACKS
        if seen.version_lag > seen.lag_bound:
            return Reason.WEIGHTS_LATE
    wait_s = settings.up_cooldown_s if target > seen.wanted else settings.down_cooldown_s
    if state.changed_s is not None and now_s - state.changed_s < wait_s:
        return Reason.COOLDOWN
    return None


class AutoscalingConfig(Frozen):
    """Rollout workers that follow the learner (docs/cluster.md): more when it waits, fewer when groups wait for it."""

    actuator: Literal["off", "fleet", "external"] = "off"
    """Who changes the number of workers, exactly one. off: `bapo scale RUN N`. fleet: the rollout server, as the
    rule says. external: whatever adds hosts to the Ray cluster (HPA or KEDA on `bapo_rollout_desired_workers`); the
    fleet then has as many workers as the cluster has room for."""
    min_workers: int = Field(1, ge=1)
    """Never fewer."""
    max_workers: int | None = Field(None, ge=1)
    """Never more; null: rollout.max_workers."""
    window_s: float = Field(15.0, gt=0, le=MAX_SECONDS)
    """The run is judged at the first weight update after this many seconds; without one, after eight times as long."""
    smoothing_windows: int = Field(3, ge=1)
    """Rates are moving averages over about this many windows: the newest weighs 2 / (1 + smoothing_windows)."""
    headroom: float = Field(0.1, ge=0)
    """Workers beyond what the learner takes, as a share: groups differ in length, and workers die."""
    hysteresis: float = Field(0.2, ge=0)
    """Rates that move by less than this share change nothing."""
    wait_threshold: float = Field(0.1, gt=0, le=1)
    """The learner waits, when it spends this share of its time or more without a batch."""
    idle_threshold: float = Field(0.1, gt=0, le=1)
    """Workers idle, when this share of their room or more is empty."""
    spare_threshold: float = Field(0.5, gt=0, le=1)
    """More workers would have nothing to do, when this share of the room is empty even while the learner waits."""
    ready_low: float = Field(1.0, gt=0)
    """Batches of fresh groups below which a learner that waits asks for a worker more."""
    ready_high: float = Field(2.0, gt=0)
    """Batches of fresh groups from which on groups wait for the learner."""
    stale_threshold: float = Field(0.01, ge=0, le=1)
    """Share of pushed groups that were too old to be taken, above which there are too many workers."""
    up_cooldown_s: float = Field(30.0, ge=0, le=MAX_SECONDS)
    """After any change, seconds before the next one upwards."""
    down_cooldown_s: float = Field(120.0, ge=0, le=MAX_SECONDS)
    """After any change, seconds before the next one downwards."""
    max_up: int = Field(4, ge=1)
    """Most workers that one change adds."""
    max_down: int = Field(1, ge=1)
    """Most workers that one change takes away."""

    @model_validator(mode="after")
    def bounds_are_ordered(self) -> Self:
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(
                f"max_workers = {self.max_workers} is less than min_workers = {self.min_workers}; "
                f"write max_workers = {self.min_workers}, or fewer min_workers"
            )
        if self.ready_high < self.ready_low:
            raise ValueError(
                f"ready_high = {self.ready_high} is below ready_low = {self.ready_low}, so both would hold at once; "
                f"write ready_high = {self.ready_low} or more"
            )
        return self
