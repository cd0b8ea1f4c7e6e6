"""[autoscaling]: settings of the rule in `rollout_server/autoscaling/rule.py`, and the reasons that it reports."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, model_validator

from bapo.algorithms.settings import MAX_SECONDS, Frozen


class ScalingReason(StrEnum):
    """Why the desired number is what it is."""

    OFF = "off"
    BOUNDS = "bounds"
    """The number was outside the bounds."""
    MISSING = "input_missing"
    MEASURING = "measuring"
    """There are too few measurements."""
    COOLDOWN = "cooldown"
    """A change is due, but in cooldown."""
    STARTING = "workers_start"
    """More are needed, but requested ones are not ready yet."""
    WORK_LACKS = "work_lacks"
    """More are needed by the rates, but workers have free capacity while the learner waits: requests or the latency of
    a response are the bottleneck. A larger `cadence.max_steps_ahead` helps, more workers do not."""
    WEIGHTS_LATE = "weights_late"
    """More are needed, but workers have older weights than requests allow: more of them would not help."""
    MATCHED = "matched"
    RATE_ABOVE = "rate_above"
    RATE_BELOW = "rate_below"
    LEARNER_WAITS = "learner_waits"
    GROUPS_WAIT = "groups_wait"
    GROUPS_STALE = "groups_stale"


class AutoscalingConfig(Frozen):
    """Autoscaling of rollout workers (docs/cluster.md): more if the learner waits, fewer if groups queue up."""

    actuator: Literal["off", "fleet", "external"] = "off"
    """What changes the number of workers. off: only `bapo scale RUN N`. fleet: the rollout server. external: whatever
    adds hosts to the Ray cluster (HPA or KEDA on `bapo_rollout_desired_workers`); the number of workers follows the
    size of the cluster."""
    min_workers: int = Field(1, ge=1)
    """Minimum number of workers."""
    max_workers: int | None = Field(None, ge=1)
    """Maximum number of workers; null: rollout.max_workers."""
    window_s: float = Field(15.0, gt=0, le=MAX_SECONDS)
    """Decisions are made at the first weight update after this many seconds, or after eight times as long."""
    smoothing_windows: int = Field(3, ge=1)
    """Rates are moving averages over about this many windows: the newest has weight 2 / (1 + smoothing_windows)."""
    headroom: float = Field(0.1, ge=0)
    """Fraction of workers beyond the need, for varying group lengths and worker crashes."""
    hysteresis: float = Field(0.2, ge=0)
    """Changes of rates below this fraction are ignored."""
    wait_threshold: float = Field(0.1, gt=0, le=1)
    """Fraction of time without a batch from which the learner counts as waiting."""
    idle_threshold: float = Field(0.1, gt=0, le=1)
    """Idle fraction of capacity from which workers count as idle."""
    spare_threshold: float = Field(0.5, gt=0, le=1)
    """Idle fraction of capacity while the learner waits, from which more workers would not help."""
    ready_low: float = Field(1.0, gt=0)
    """Queued batches below which a waiting learner causes an additional worker."""
    ready_high: float = Field(2.0, gt=0)
    """Queued batches from which groups count as waiting for the learner."""
    stale_threshold: float = Field(0.01, ge=0, le=1)
    """Fraction of stale pushed groups above which there are too many workers."""
    up_cooldown_s: float = Field(30.0, ge=0, le=MAX_SECONDS)
    """Seconds after a change before scaling up."""
    down_cooldown_s: float = Field(120.0, ge=0, le=MAX_SECONDS)
    """Seconds after a change before scaling down."""
    max_up: int = Field(4, ge=1)
    """Maximum number of workers added at once."""
    max_down: int = Field(1, ge=1)
    """Maximum number of workers removed at once."""

    @model_validator(mode="after")
    def bounds_are_ordered(self) -> Self:
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(
                f"max_workers = {self.max_workers} is less than min_workers = {self.min_workers}; "
                f"set max_workers = {self.min_workers}, or lower min_workers"
            )
        if self.ready_high < self.ready_low:
            raise ValueError(
                f"ready_high = {self.ready_high} is below ready_low = {self.ready_low}, so both would apply at once; "
                f"set ready_high = {self.ready_low} or more"
            )
        return self
