"""The learning rate of each step: linear warm-up, then constant, or falling until the last step of the run."""

from __future__ import annotations

import math

from bapo.config.learner import LearnerConfig


def lr_at(settings: LearnerConfig, step: int, num_steps: int) -> float:
    """Learning rate of step `step` (from 1) of a run of `num_steps`.

    The last warm-up step has the peak; the last step of the run has `lr_final` of it. A run that is made longer and
    resumed goes on with the rates of the longer run.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.lr * step / warmup
    done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    return settings.lr * (settings.lr_final + (1.0 - settings.lr_final) * _left(settings.lr_schedule, done))


def _left(schedule: str, done: float) -> float:
    """Share of the way from the peak down to the end that is left, when `done` of the steps are."""
    if schedule == "linear":
        return 1.0 - done
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    return 1.0
