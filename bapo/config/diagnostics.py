"""What a run measures of itself beside its training."""

from __future__ import annotations

from pydantic import Field

from bapo.algorithms.settings import Frozen


class DiagnosticsConfig(Frozen):
    """How far the policy is from the policies that sampled its batch (docs/monitoring.md)."""

    every: int = Field(1, ge=0)
    """Learner steps between two measurements; 0: none. They cost no forward pass."""
    tv_warn: float = Field(0.05, gt=0, le=1)
    """A subset or age whose mean total variation per token is more than this is warned of."""
    ess_warn: float = Field(0.5, ge=0, lt=1)
    """A subset or age whose effective share of responses is less than this is warned of."""
    token_records: int = Field(0, ge=0)
    """Learner steps between two token records: text, entropy, ratio and clipping of every token of the batch, for the
    run's page (docs/monitoring.md); 0: none. They cost no forward pass."""
    token_records_mb: int = Field(256, ge=1)
    """Most MB of texts and token records on disk (RUN/token_records); beyond it the oldest are removed."""
    texts: int = Field(1, ge=0)
    """Learner steps between two steps whose responses are kept as text for the run's page, also those of groups that
    did not train; 0: none."""
    texts_mb: int = Field(8, ge=1)
    """Most MB of frames of one step whose text is kept: so much of the groups that did not train, which the buffer
    holds until the next checkpoint, and as much of the batch."""
    quiet_steps: int = Field(20, ge=0)
    """After a line in the log about one subset, the next one about it comes this many steps later at the earliest."""
