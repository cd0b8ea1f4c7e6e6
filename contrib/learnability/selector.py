"""Learnability: prompts whose rewards are expected to vary most, E[p (1 - p)], next to a share of new ones.

    first visits of the latest steps --moments--> prior Beta(s m, s (1 - m)) of a new prompt's pass rate p
    groups of a prompt, decayed      --Beta-----> posterior of its p --> E[p (1 - p)], the signal of its advantages

The prior is the empirical one: m is the mean reward of first visits, and s follows from their mean reward variance
v = E[k (G - k) / (G (G - 1))], which is m (1 - m) s / (s + 1) under Beta(s m, s (1 - m)). So a prompt that was not seen
has the value v, and a seen one is repeated only while it is worth more than that. All groups are sampled from the
current policy: what is reused is the prompt, not the response.

Source: p (1 - p) is the learnability of Foster et al. (arXiv 2502.12272), who measure it by additional responses;
posteriors from the training's own groups as in MoPPS. The empirical prior and the share of new prompts are ours.
What would falsify it: at equal responses it does not exceed the uniform order, or training prompts improve while
held-out ones do not (then the repeated prompts are memorized).
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from bapo.algorithms.randomness import generator_for
from bapo.algorithms.reward_levels import expected_variance
from bapo.algorithms.selectors.base import Floats, Indices, PromptPool, PromptSelector, State, restored
from bapo.core.success_counts import SuccessCounts

MEMORY = 0.9
"""Weight of the first visits of the step before in the moments of the prior: about the latest ten steps."""
LEAST_STRENGTH, LARGEST_STRENGTH = 0.02, 100.0
"""Bounds of s: nearly all prompts are solved or hopeless; all are equally difficult."""
NEVER = -1.0
"""Step of the last visit of a prompt without one."""


class Learnability(PromptSelector):
    """Repeats the most learnable prompts and explores new ones."""

    class Settings(PromptSelector.Settings):
        """Of repetition and exploration."""

        decay: float = Field(1.0, ge=0, le=1)
        """lambda, decay of the evidence at each new group of a prompt (1: none)."""
        explore: float = Field(0.5, ge=0, le=1)
        """Share of the batch for prompts that have not been sampled yet, while there are any."""
        cooldown: int = Field(2, ge=0)
        """Steps before a prompt is sampled again."""

    _own: Settings

    def __init__(self, own: Settings, pool: PromptPool, *, seed: int, batch_size: int) -> None:
        super().__init__(own, pool, seed=seed, batch_size=batch_size)
        self._correct: Floats = np.zeros(len(pool))
        self._incorrect: Floats = np.zeros(len(pool))
        self._visited: Floats = np.full(len(pool), NEVER)
        self._proposed: Floats = np.full(len(pool), NEVER)
        self._newest, self._before = 0, self._proposed
        """The newest step with a proposal, and what had been proposed before it: asked twice, it proposes the same."""
        self._moments: Floats = np.zeros(3)
        """Decayed number of first visits, and sums of their pass rates and reward variances."""

    def propose(self, step: int, n: int) -> Indices:
        """Seen prompts that are worth more than a new one, at most (1 - explore) B, then new ones, then the others."""
        if step != self._newest:
            self._newest, self._before = step, self._proposed
        latest = np.maximum(self._before, self._visited)
        is_new = latest == NEVER
        rests = ~is_new & (step - latest <= self._own.cooldown)
        shuffled = generator_for(self._seed, step, "learnability").permutation(len(self._pool))
        value = self._values()
        ranked = shuffled[np.argsort(-value[shuffled], kind="stable")]
        wanted = ranked[~is_new[ranked] & ~rests[ranked] & (value[ranked] > self._value_of_new())]
        repeated = wanted[: round((1 - self._own.explore) * self._batch_size)]
        first = np.concatenate([repeated, shuffled[is_new[shuffled]]])
        others = ranked[~np.isin(ranked, first)]
        others = np.concatenate([others[~rests[others]], others[rests[others]]])
        order: Indices = np.concatenate([first, others])
        self._proposed = self._before.copy()
        self._proposed[order[: self._batch_size]] = step
        return order[:n]

    def observe(self, success_counts: SuccessCounts) -> None:
        """Evidence of earlier visits decays with each new one."""
        self._moments *= MEMORY
        counts = zip(success_counts.prompt_ids, success_counts.reward_sums, success_counts.sizes, strict=True)
        for prompt_id, k, size in counts:
            i = int(self._pool.indices((prompt_id,))[0])
            if self._visited[i] == NEVER and size > 1:
                self._moments += (1.0, k / size, k * (size - k) / (size * (size - 1.0)))
            decay = self._own.decay
            self._correct[i] = decay * self._correct[i] + k
            self._incorrect[i] = decay * self._incorrect[i] + size - k
            self._visited[i] = success_counts.step

    def state(self) -> State:
        return {
            "correct": self._correct.copy(),
            "incorrect": self._incorrect.copy(),
            "visited": self._visited.copy(),
            "proposed": self._proposed.copy(),
            "moments": self._moments.copy(),
        }

    def restore(self, state: State) -> None:
        self._correct = restored(state, "correct", self._correct)
        self._incorrect = restored(state, "incorrect", self._incorrect)
        self._visited = restored(state, "visited", self._visited)
        self._proposed = restored(state, "proposed", self._proposed)
        self._moments = restored(state, "moments", self._moments)

    def _values(self) -> Floats:
        a, b = prior(self._moments)
        return expected_variance(a + self._correct, b + self._incorrect)

    def _value_of_new(self) -> float:
        return expected_variance(*prior(self._moments))


def prior(moments: Floats) -> tuple[float, float]:
    """(a, b) of Beta(a, b) with the mean and the expected variance of the first visits; (1, 1) before the first.

    Args:
        moments: [3] number of first visits, sum of k / G, sum of k (G - k) / (G (G - 1)).
    """
    number, rates, variances = (float(value) for value in moments)
    if not 0 < rates < number:
        return 1.0, 1.0
    mean = rates / number
    within = min(1.0, variances / number / (mean * (1 - mean)))
    strength = min(LARGEST_STRENGTH, max(LEAST_STRENGTH, within / max(1e-9, 1 - within)))
    return strength * mean, strength * (1 - mean)
