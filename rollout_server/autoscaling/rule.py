"""The desired number of rollout workers, as a pure function.

    need = c (1 + headroom) / p      c: groups/s consumed by the learner while it is not waiting
                                     p: groups/s produced by one worker at full load
    busy = ready (1 - idle) (1 + headroom)        workers that are busy

Both are real numbers. The number n is kept while it is in the band

    ceil(need / (1 + hysteresis))  <=  n  <=  ceil(max(need, busy) (1 + hysteresis))

and otherwise becomes ceil(need), or ceil(max(need, busy)) when scaling down. So a need that varies by less than the
factor 1 + hysteresis does not cause oscillation. Within the band the queue decides, one worker at a time:

    learner waits, workers are not idle, less than a batch is ready   one more (p was overestimated)
    learner does not wait, groups are queued, n - 1 workers suffice   one fewer
    groups are stale                                                  one fewer

Workers that idle while the learner waits do not call for more: with max_steps_ahead = 0 both alternate. `busy` keeps
the rule from reverting decisions of the queue. Rates remain valid after a change of n, because they are per worker and
second of work; shares of time do not, because they describe the old n.

Does not cover: which worker to remove, and engines whose throughput is not proportional to their load: p is then
overestimated at low occupancy, which the queue corrects one worker at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bapo.config.autoscaling import AutoscalingConfig, ScalingReason

SMOOTHING_WINDOWS = 3
"""Rates are moving averages over about this many windows: the newest has weight 2 / (1 + SMOOTHING_WINDOWS)."""
HEADROOM = 0.1
"""Fraction of workers beyond the need, for varying group lengths and worker crashes."""
HYSTERESIS = 0.2
"""Changes of rates below this fraction are ignored."""
WAIT_THRESHOLD = 0.1
"""Fraction of time without a batch from which the learner counts as waiting."""
IDLE_THRESHOLD = 0.1
"""Idle fraction of capacity from which workers count as idle."""
SPARE_THRESHOLD = 0.5
"""Idle fraction of capacity while the learner waits, from which more workers would not help."""
READY_LOW = 1.0
"""Queued batches below which a waiting learner causes an additional worker."""
READY_HIGH = 2.0
"""Queued batches from which groups count as waiting for the learner."""
STALE_THRESHOLD = 0.01
"""Fraction of stale pushed groups above which there are too many workers."""
MAX_UP, MAX_DOWN = 4, 1
"""Maximum number of workers added, and removed, at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Measurements of one window. None: not measured."""

    wanted: int
    """Target number of workers."""
    ready: int
    """Workers that are sampling."""
    wait_share: float | None
    """[0, 1] fraction of time in which the learner waited for a batch."""
    idle_share: float | None
    """[0, 1] idle fraction of the ready workers' capacity."""
    ready_batches: float | None
    """Queued fresh groups divided by B, at the end of the window."""
    consume_rate: float | None
    """c: fresh groups consumed per second while the learner was not waiting."""
    produce_rate: float | None
    """p: fresh groups per second and worker at full load."""
    stale_share: float | None
    """[0, 1] fraction of pushed groups that were stale."""
    version_lag: int | None
    """Steps between the learner and the oldest weights of a ready worker."""
    spare_share: float
    """[0, 1] idle fraction of the ready workers' capacity while the learner waited; 0 if it did not wait."""
    lag_bound: int
    """Maximum staleness (`cadence.max_staleness`)."""


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
    """State of the rule."""

    consume_rate: float | None = None
    produce_rate: float | None = None
    wait_share: float | None = None
    idle_share: float | None = None
    windows: int = 0
    """Windows since the last change."""
    changed_s: float | None = None
    """Time of the last change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """What the rule wants."""

    desired: int
    reason: ScalingReason
    need: float | None = None
    """Needed workers, a real number; None while a rate is unknown."""
    missing: tuple[str, ...] = ()
    """Inputs that could not be measured."""


def decide(
    settings: AutoscalingConfig, most: int, state: State, seen: Observation, now_s: float
) -> tuple[State, ScalingDecision]:
    """The next number of workers, within [min_workers, most] whatever happens.

    Args:
        most: `max_workers`, or what the fleet can hold if that is null.
        now_s: of any clock that only rises.
    """
    state = _remember(state, seen)
    number = min(max(seen.wanted, settings.min_workers), most)
    if number != seen.wanted:
        return _changed(state, now_s), ScalingDecision(desired=number, reason=ScalingReason.BOUNDS, need=_need(state))
    if missing := tuple(name for name in INPUTS if getattr(seen, name) is None):
        return state, ScalingDecision(desired=number, reason=ScalingReason.MISSING, need=_need(state), missing=missing)
    need = _need(state)
    assert need is not None, "both rates are known"
    target, reason = _target(state, seen, need)
    target = min(max(target, number - MAX_DOWN, settings.min_workers), number + MAX_UP, most)
    if held := _why_not(settings, state, seen, target, now_s):
        return state, ScalingDecision(desired=number, reason=held, need=need)
    if target == number:
        # Also when the bounds alone keep the number: then the reason says what is lacking.
        return state, ScalingDecision(desired=number, reason=reason, need=need)
    return _changed(state, now_s), ScalingDecision(desired=target, reason=reason, need=need)


def _remember(state: State, seen: Observation) -> State:
    weight = 2 / (1 + SMOOTHING_WINDOWS)

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


def _need(state: State) -> float | None:
    if state.consume_rate is None or not state.produce_rate:
        return None
    return state.consume_rate * (1 + HEADROOM) / state.produce_rate


def _target(state: State, seen: Observation, need: float) -> tuple[int, ScalingReason]:
    """Before limits, cooldown and bounds. Monotone: more demand or waiting never gives a smaller number."""
    assert state.wait_share is not None
    assert state.idle_share is not None
    assert seen.ready_batches is not None
    assert seen.stale_share is not None
    number, band = seen.wanted, 1 + HYSTERESIS
    enough = max(need, seen.ready * (1 - state.idle_share) * (1 + HEADROOM))
    waits = state.wait_share >= WAIT_THRESHOLD
    starved = waits and state.idle_share < IDLE_THRESHOLD and seen.ready_batches < READY_LOW
    stale = seen.stale_share > STALE_THRESHOLD
    if starved:
        if number < math.ceil(need / band):
            return math.ceil(need), ScalingReason.RATE_ABOVE
        return number + 1, ScalingReason.LEARNER_WAITS
    if stale:
        return min(number - 1, math.ceil(enough)), ScalingReason.GROUPS_STALE
    if number < math.ceil(need / band):
        return math.ceil(need), ScalingReason.RATE_ABOVE
    if number > math.ceil(enough * band):
        return math.ceil(enough), ScalingReason.RATE_BELOW
    if not waits and seen.ready_batches >= READY_HIGH and math.ceil(enough) < number:
        return number - 1, ScalingReason.GROUPS_WAIT
    return number, ScalingReason.MATCHED


def _why_not(
    settings: AutoscalingConfig, state: State, seen: Observation, target: int, now_s: float
) -> ScalingReason | None:
    """What holds a change back; None when nothing does."""
    assert seen.version_lag is not None
    if target == seen.wanted:
        return None
    if state.windows < 2:
        return ScalingReason.MEASURING
    if target > seen.wanted:
        if seen.ready < seen.wanted:
            return ScalingReason.STARTING
        if seen.spare_share >= SPARE_THRESHOLD:
            return ScalingReason.WORK_LACKS
        if seen.version_lag > seen.lag_bound:
            return ScalingReason.WEIGHTS_LATE
    wait_s = settings.up_cooldown_s if target > seen.wanted else settings.down_cooldown_s
    if state.changed_s is not None and now_s - state.changed_s < wait_s:
        return ScalingReason.COOLDOWN
    return None
