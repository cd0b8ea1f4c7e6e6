"""The settings of composers that keep groups to use them again: RePO, ReMix, DOTS, ARPO, ReLIFT."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from bapo.algorithms.frozen import Frozen


class ReplayConfig(Frozen):
    """What is kept of the past, and how much of it trains again; docs/methods.md says which composer reads what."""

    share: float = Field(0.0, ge=0, lt=1)
    """Part of B that is replayed instead of sampled: p of ReMix, 1 - sigma of DOTS."""
    first_step: int = Field(1, ge=1)
    """First step with that part; the steps before it are all fresh (DOTS fills its memory so)."""
    last_step: int | None = Field(None, ge=1)
    """Last step with that part: T of ReMix, on-policy afterwards; null: no end."""
    window: int = Field(2, ge=1)
    """N of ReMix: replayed groups come from so many steps before."""
    capacity: int | None = Field(512, ge=1)
    """Most groups in the memory, first in first out; null: no bound but that of each prompt."""
    per_prompt: int = Field(16, ge=1)
    """Most responses of one prompt in the memory (RePO), or most right ones (ARPO)."""
    num_rows: int = Field(8, ge=1)
    """k: stored responses that join a prompt's fresh ones (RePO)."""
    strategy: Literal["highest_k", "recent_k", "random_k", "all", "max_variance_k"] = "highest_k"
    """Which stored responses join them (RePO)."""
    keep_homogeneous: bool = False
    """Keep groups whose rewards are all equal, too (DOTS)."""
    min_success: float = Field(0.1, ge=0, lt=1)
    """A response above this reward is kept as a success (ARPO)."""
    sft_items: int | None = Field(None, ge=1)
    """Expert solutions of one supervised step, which happens when so many wait (ReLIFT); null: B."""

    @model_validator(mode="after")
    def replay_does_not_end_before_it_begins(self) -> Self:
        if self.last_step is not None and self.last_step < self.first_step:
            raise ValueError(
                f"replay.last_step = {self.last_step} is before replay.first_step = {self.first_step}, so no step "
                f"would replay; write last_step = {self.first_step} or later, or null"
            )
        return self
