"""The `[autoscaling]` section."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from bapo.algorithms.frozen import MOST_SECONDS, Frozen


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
    window_s: float = Field(15.0, gt=0, le=MOST_SECONDS)
    """The run is judged at the first weight update after so many seconds; without one, after eight times as long."""
    smoothing_windows: int = Field(3, ge=1)
    """Rates are moving averages over about so many windows: the newest weighs 2 / (1 + smoothing_windows)."""
    headroom: float = Field(0.1, ge=0)
    """Workers beyond what the learner takes, as a share: groups differ in length, and workers die."""
    hysteresis: float = Field(0.2, ge=0)
    """Rates that move by less than this share change nothing."""
    wait_high: float = Field(0.1, gt=0, le=1)
    """The learner waits, when it spends this share of its time or more without a batch."""
    idle_high: float = Field(0.1, gt=0, le=1)
    """Workers idle, when this share of their room or more is empty."""
    spare_high: float = Field(0.5, gt=0, le=1)
    """More workers would have nothing to do, when this share of the room is empty even while the learner waits."""
    ready_low: float = Field(1.0, gt=0)
    """Batches of fresh groups below which a learner that waits asks for a worker more."""
    ready_high: float = Field(2.0, gt=0)
    """Batches of fresh groups from which on groups wait for the learner."""
    stale_high: float = Field(0.01, ge=0, le=1)
    """Share of pushed groups that were too old to be taken, above which there are too many workers."""
    up_cooldown_s: float = Field(30.0, ge=0, le=MOST_SECONDS)
    """After any change, seconds before the next one upwards."""
    down_cooldown_s: float = Field(120.0, ge=0, le=MOST_SECONDS)
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
