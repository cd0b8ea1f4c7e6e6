"""MoPPS: each prompt's success rate is a Beta posterior, and sampled rates near 1/2 are chosen (docs/methods.md).

Qu et al., *Can Prompt Difficulty be Online Predicted for Accelerating RL Finetuning of Reasoning Models?*
"""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from bapo.algorithms.randomness import generator_for
from bapo.algorithms.selectors.base import Floats, Indices, PromptPool, PromptSelector, State, restored
from bapo.core.success_counts import SuccessCounts

PRIOR = 1.0
"""alpha_0 = beta_0: before its first group any success rate is as likely as any other."""


class Mopps(PromptSelector):
    """Thompson sampling over a pool of candidates."""

    class Settings(PromptSelector.Settings):
        """Of the choice of candidates."""

        target: float = Field(0.5, ge=0, le=1)
        """gamma*, the target success rate of chosen prompts."""
        pool_ratio: float = Field(16.0, ge=1)
        """Candidates per prompt of the batch, drawn uniformly."""
        mode: Literal["topk", "threshold"] = "topk"
        """The B candidates whose sampled success rates are nearest to `target`, or any within `band`."""
        band: tuple[float, float] = (0.3, 0.7)
        """With `threshold`: (low, high); if too few candidates are inside, the nearest to `target` follow."""
        decay: float = Field(1.0, ge=0, le=1)
        """lambda, decay of the evidence at each new group of a prompt (1: none)."""

        @model_validator(mode="after")
        def band_is_ordered(self) -> Self:
            low, high = self.band
            if not 0 <= low <= high <= 1:
                raise ValueError(f"band = [{low}, {high}]: must be low <= high, both in [0, 1]")
            return self

    _own: Settings

    def __init__(self, own: Settings, pool: PromptPool, *, seed: int, batch_size: int) -> None:
        super().__init__(own, pool, seed=seed, batch_size=batch_size)
        self._alpha: Floats = np.full(len(pool), PRIOR)
        self._beta: Floats = np.full(len(pool), PRIOR)

    def propose(self, step: int, n: int) -> Indices:
        """The candidates, fittest first, then the prompts that are not candidates."""
        settings, rng = self._own, generator_for(self._seed, step, "mopps")
        shuffled = rng.permutation(len(self._pool))
        candidates, others = np.split(shuffled, [round(settings.pool_ratio * self._batch_size)])
        rates = rng.beta(self._alpha[candidates], self._beta[candidates])
        band = settings.band if settings.mode == "threshold" else None
        order: Indices = np.concatenate([candidates[by_fitness(rates, settings.target, band)], others])
        return order[:n]

    def observe(self, success_counts: SuccessCounts) -> None:
        """Two groups of one prompt in a step count one after the other."""
        for i, k, size in zip(
            self._pool.indices(success_counts.prompt_ids), success_counts.reward_sums, success_counts.sizes, strict=True
        ):
            self._alpha[i], self._beta[i] = updated(self._alpha[i], self._beta[i], float(k), int(size), self._own.decay)

    def state(self) -> State:
        """alpha and beta, [N] each."""
        return {"alpha": self._alpha.copy(), "beta": self._beta.copy()}

    def restore(self, state: State) -> None:
        self._alpha, self._beta = restored(state, "alpha", self._alpha), restored(state, "beta", self._beta)


def updated(alpha: float, beta: float, k: float, size: int, decay: float) -> tuple[float, float]:
    """Posterior after a group with k of `size` right; `decay` is lambda, which draws old evidence to the prior."""
    return (
        decay * alpha + (1 - decay) * PRIOR + k,
        decay * beta + (1 - decay) * PRIOR + (size - k),
    )


def by_fitness(rates: Floats, target: float, band: tuple[float, float] | None) -> Indices:
    """Order of candidates: nearest to the target first; with a band, those inside it before them, as they come."""
    nearest = np.argsort((rates - target) ** 2, kind="stable")
    if band is None:
        return nearest
    inside = (band[0] <= rates) & (rates <= band[1])
    return np.concatenate([np.flatnonzero(inside), nearest[~inside[nearest]]])
