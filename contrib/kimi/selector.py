"""Kimi k1.5: prompts are sampled in proportion to how often they fail, on request from easy to hard."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from bapo.algorithms.randomness import generator_for
from bapo.algorithms.selectors.base import Floats, Indices, PromptPool, PromptSelector, State, first_by_weight, restored
from bapo.core.errors import ConfigError
from bapo.core.success_counts import SuccessCounts


class Kimi(PromptSelector):
    """p_i in proportion to 1 - s_i, without replacement within a step; s_i is the prompt's success rate so far.

    A prompt that was never sampled has s_i = 0.
    """

    class Settings(PromptSelector.Settings):
        """Of the curriculum."""

        curriculum_steps: int = Field(0, ge=0)
        """Steps over which prompts are added, starting with the easiest level; 0: all from the start."""

    _own: Settings

    def __init__(self, own: Settings, pool: PromptPool, *, seed: int, batch_size: int) -> None:
        super().__init__(own, pool, seed=seed, batch_size=batch_size)
        if own.curriculum_steps and pool.levels is None:
            raise ConfigError(
                f"selector.curriculum_steps = {own.curriculum_steps}, but the task has no levels; set it to 0, "
                "or add a method level(prompt) -> float to the task"
            )
        self._right: Floats = np.zeros(len(pool))
        self._sampled: Floats = np.zeros(len(pool))

    def propose(self, step: int, n: int) -> Indices:
        """See `PromptSelector.propose`. Prompts that never fail come last, and after them those not admitted yet."""
        rng = generator_for(self._seed, step, "kimi")
        with np.errstate(divide="ignore"):
            log_weights = np.log(failure_rates(self._right, self._sampled))
        order = first_by_weight(log_weights, len(self._pool), rng)
        if self._own.curriculum_steps and self._pool.levels is not None:
            is_admitted = admitted(self._pool.levels, step / self._own.curriculum_steps)[order]
            order = np.concatenate([order[is_admitted], order[~is_admitted]])
        return order[:n]

    def observe(self, success_counts: SuccessCounts) -> None:
        """Counts right responses and all responses of each prompt."""
        places = self._pool.indices(success_counts.prompt_ids)
        np.add.at(self._right, places, success_counts.reward_sums)
        np.add.at(self._sampled, places, success_counts.sizes)

    def state(self) -> State:
        """Right and all responses, [N] each."""
        return {"right": self._right.copy(), "sampled": self._sampled.copy()}

    def restore(self, state: State) -> None:
        self._right, self._sampled = restored(state, "right", self._right), restored(state, "sampled", self._sampled)


def failure_rates(right: Floats, sampled: Floats) -> Floats:
    """[N] 1 - s_i; 1 for a prompt that was never sampled."""
    rates: Floats = np.maximum(0.0, 1.0 - right / np.maximum(1.0, sampled))
    return rates


def admitted(levels: Floats, share: float) -> NDArray[np.bool_]:
    """[N] whether a prompt is among the easiest `share` of all; a level is admitted whole."""
    last = min(len(levels), max(1, math.ceil(share * len(levels)))) - 1
    is_admitted: NDArray[np.bool_] = levels <= np.partition(levels, last)[last]
    return is_admitted
