"""Coefficients that change with the step."""

from __future__ import annotations

import math

from bapo.algorithms.levels import TOLERANCE

FULL_UNTIL = 50
"""Last step at which the base model has the whole share."""
STEPS_PER_STAGE = 10
LOSS_PER_STAGE = 0.1
LEAST = 0.5


def reference_share(step: int) -> float:
    """lambda(t) = max(1 - 0.1 ceil(max(t - 50, 0) / 10), 0.5): ReMix's share of the KL to the base model (ADR 0055)."""
    stages = math.ceil(max(step - FULL_UNTIL, 0) / STEPS_PER_STAGE - TOLERANCE)
    return max(1.0 - LOSS_PER_STAGE * stages, LEAST)
