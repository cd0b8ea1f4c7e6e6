"""What a run measures of itself beside its training."""

from __future__ import annotations

from pydantic import Field

from bapo.algorithms.settings import Frozen


class DiagnosticsConfig(Frozen):
    """How far the policy is from the policies that sampled its batch (docs/theory.md)."""

    every: int = Field(1, ge=0)
    """Learner steps between two measurements; 0: none. They cost no forward pass."""
    tv_warn: float = Field(0.05, gt=0, le=1)
    """A subset or age whose mean total variation per token is more than this is warned of."""
    ess_warn: float = Field(0.5, ge=0, lt=1)
    """A subset or age whose effective share of responses is less than this is warned of."""
    quiet_steps: int = Field(20, ge=0)
    """After a line in the log about one subset, the next one about it comes this many steps later at the earliest."""
