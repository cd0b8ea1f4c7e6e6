"""Review: prompts that were solved are sampled again at doubling intervals, next to new ones (arXiv 2606.03087).

    all G right --10 steps--> again --all right: 20 steps--> again --all right: 40 steps--> ...
                                 '--not all right: trains, and is no longer under review

Training on hard prompts unlearns steps that the model had mastered, and no new prompt may show it. A prompt that was
solved and is no longer gives an informative group exactly there. `any` is the control: prompts of the same ages
whatever their result was.
What would falsify it: docs/studies/review.md.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from bapo.algorithms.randomness import generator_for
from bapo.algorithms.selectors.base import Floats, Indices, PromptPool, PromptSelector, State, restored
from bapo.core.success_counts import SuccessCounts

NEVER = -1.0
"""Step of the last visit of a prompt without one; interval of a prompt that is not under review."""


class Review(PromptSelector):
    """Prompts that are due, then new ones, then those that have rested longest."""

    class Settings(PromptSelector.Settings):
        """Of the reviews."""

        which: Literal["solved", "any"] = "solved"
        """Prompts whose last group was all correct, or any that was sampled."""
        share: float = Field(0.25, ge=0, le=1)
        """Largest share of the batch."""
        first: int = Field(10, ge=1)
        """Steps before the first review; each further interval is twice the one before."""

    _own: Settings

    def __init__(self, own: Settings, pool: PromptPool, *, seed: int, batch_size: int) -> None:
        super().__init__(own, pool, seed=seed, batch_size=batch_size)
        self._visited: Floats = np.full(len(pool), NEVER)
        self._interval: Floats = np.full(len(pool), NEVER)
        self._proposed: Floats = np.full(len(pool), NEVER)
        self._newest, self._before = 0, self._proposed
        """The newest step with a proposal, and what had been proposed before it: asked twice, it proposes the same."""

    def propose(self, step: int, n: int) -> Indices:
        """At most `share` B that are due, longest overdue first."""
        if step != self._newest:
            self._newest, self._before = step, self._proposed
        latest = np.maximum(self._before, self._visited)
        shuffled = generator_for(self._seed, step, "review").permutation(len(self._pool))
        rested = step - latest
        is_due = (self._interval > 0) & (rested >= self._interval)
        due = shuffled[is_due[shuffled]]
        due = due[np.argsort(-(rested[due] / self._interval[due]), kind="stable")]
        reviews = due[: round(self._own.share * self._batch_size)]
        others = shuffled[~np.isin(shuffled, reviews)]
        order: Indices = np.concatenate([reviews, others[np.argsort(latest[others], kind="stable")]])
        self._proposed = self._before.copy()
        self._proposed[order[: self._batch_size]] = step
        return order[:n]

    def observe(self, success_counts: SuccessCounts) -> None:
        """All right, or any result with `any`: the interval doubles."""
        places = self._pool.indices(success_counts.prompt_ids)
        for i, k, size in zip(places, success_counts.reward_sums, success_counts.sizes, strict=True):
            stays = self._own.which == "any" or k == size
            self._interval[i] = (
                (2 * self._interval[i] if self._interval[i] > 0 else self._own.first) if stays else NEVER
            )
            self._visited[i] = success_counts.step

    def state(self) -> State:
        """Last visits, intervals and proposals, [N] each."""
        return {"visited": self._visited.copy(), "interval": self._interval.copy(), "proposed": self._proposed.copy()}

    def restore(self, state: State) -> None:
        self._visited, self._interval, self._proposed = (
            restored(state, name, like)
            for name, like in (("visited", self._visited), ("interval", self._interval), ("proposed", self._proposed))
        )
        self._newest = 0
