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
    """off: `bapo scale RUN N`. fleet: the rollout server. external: what adds hosts to the Ray cluster (HPA, KEDA on
    `bapo_rollout_desired_workers`); workers follow its size."""
    min_workers: int = Field(1, ge=1)
    """Fewest workers."""
    max_workers: int | None = Field(None, ge=1)
    """Most workers; null: rollout.max_workers."""
    window_s: float = Field(15.0, gt=0, le=MAX_SECONDS)
    """Seconds of measuring: a decision comes at the first weight update after them, or after eight times as long."""
    up_cooldown_s: float = Field(30.0, ge=0, le=MAX_SECONDS)
    """Seconds from a change to scaling up."""
    down_cooldown_s: float = Field(120.0, ge=0, le=MAX_SECONDS)
    """Seconds from a change to scaling down."""

    @model_validator(mode="after")
    def bounds_are_ordered(self) -> Self:
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(
                f"max_workers = {self.max_workers} is less than min_workers = {self.min_workers}; "
                f"set max_workers = {self.min_workers}, or lower min_workers"
            )
        return self
