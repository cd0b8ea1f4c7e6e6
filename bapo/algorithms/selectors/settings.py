"""The settings of the prompt selectors (docs/methods.md)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from bapo.algorithms.settings import Frozen


class SelectorConfig(Frozen):
    """Settings of the prompt selector (`algorithm.selector`). Each key lists the selectors that use it."""

    target: float = Field(0.5, ge=0, le=1)
    """`mopps`: gamma*, the target success rate of chosen prompts."""
    pool_ratio: float = Field(16.0, ge=1)
    """`mopps`: candidates per prompt of the batch, drawn uniformly."""
    mode: Literal["topk", "threshold"] = "topk"
    """`mopps`: the B candidates whose sampled success rates are nearest to `target`, or any within `band`."""
    band: tuple[float, float] = (0.3, 0.7)
    """`mopps` with `threshold`: (low, high); if too few candidates are inside, the nearest to `target` follow."""
    decay: float = Field(1.0, ge=0, le=1)
    """`mopps`, `learnability`: lambda, decay of the evidence at each new group of a prompt (1: none)."""
    explore: float = Field(0.5, ge=0, le=1)
    """`learnability`: share of the batch for prompts that have not been sampled yet, while there are any."""
    cooldown: int = Field(2, ge=0)
    """`learnability`: steps before a prompt is sampled again."""
    reference_prompts: int = Field(256, ge=2)
    """`dots`: K reference prompts, drawn uniformly and sampled only to measure their difficulty."""
    reference_every: int = Field(2, ge=1)
    """`dots`: steps between measurements; each selection covers these steps."""
    temperature: float = Field(1e-3, gt=0)
    """`dots`: tau of p ~ exp(-|d - 1/2| / tau)."""
    projection_dim: int = Field(64, ge=1)
    """`dots`: dimension of the projected queries and keys of the attention."""
    projection_lr: float = Field(3e-3, gt=0)
    """`dots`: learning rate of projection and calibration."""
    projection_epochs: int = Field(20, ge=0)
    """`dots`: epochs over the newest references at each measurement; 0: projection and calibration are not trained."""
    embeddings: str | None = None
    """`dots`: a .npz file with `ids` [N] and `embeddings` [N, D]; null: the learner computes them with the base model
    (mean last hidden state over each prompt) before the first step."""
    curriculum_steps: int = Field(0, ge=0)
    """`kimi`: steps over which prompts are added, starting with the easiest level; 0: all from the start."""

    @model_validator(mode="after")
    def band_is_ordered(self) -> Self:
        low, high = self.band
        if not 0 <= low <= high <= 1:
            raise ValueError(f"band = [{low}, {high}]: must be low <= high, both in [0, 1]")
        return self
