"""The settings of the prompt selectors (docs/methods.md)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from bapo.algorithms.settings import Frozen


class SelectorConfig(Frozen):
    """How prompts are chosen; `algorithm.selector` says by which rule. Each key names the rule that reads it."""

    target: float = Field(0.5, ge=0, le=1)
    """`mopps`: gamma*, the success rate that a chosen prompt should have."""
    pool_ratio: float = Field(16.0, ge=1)
    """`mopps`: candidates per prompt of the batch, drawn uniformly."""
    mode: Literal["topk", "threshold"] = "topk"
    """`mopps`: the B candidates whose sampled success rates are nearest to `target`, or any within `band`."""
    band: tuple[float, float] = (0.3, 0.7)
    """`mopps` with `threshold`: (low, high); when too few candidates lie inside, the nearest to `target` follow."""
    decay: float = Field(1.0, ge=0, le=1)
    """`mopps`: lambda, what is left of the evidence at each new group of a prompt (1: all)."""
    reference_prompts: int = Field(256, ge=2)
    """`dots`: K prompts that are drawn uniformly and sampled only to measure their difficulty."""
    reference_every: int = Field(2, ge=1)
    """`dots`: steps between two such measurements, which are also those of one selection."""
    temperature: float = Field(1e-3, gt=0)
    """`dots`: tau of p ~ exp(-|d - 1/2| / tau)."""
    projection_dim: int = Field(64, ge=1)
    """`dots`: dimensions that queries and keys of the attention are projected to."""
    projection_lr: float = Field(3e-3, gt=0)
    """`dots`: learning rate of projection and calibration."""
    projection_epochs: int = Field(20, ge=0)
    """`dots`: passes over the newest references at each measurement; 0 leaves projection and calibration as made."""
    embeddings: str | None = None
    """`dots`: a .npz file with `ids` [N] and `embeddings` [N, D]; null: the learner makes one of the base model, the
    mean of the last hidden states over each prompt, before the first step."""
    curriculum_steps: int = Field(0, ge=0)
    """`kimi`: steps over which prompts are admitted from the easiest level on; 0: all at once."""

    @model_validator(mode="after")
    def band_is_ordered(self) -> Self:
        low, high = self.band
        if not 0 <= low <= high <= 1:
            raise ValueError(f"band = [{low}, {high}]: write low <= high, both in [0, 1]")
        return self
