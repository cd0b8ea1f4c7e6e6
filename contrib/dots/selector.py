"""DOTS: measure a few prompts, predict all others, choose those that are predicted to be half right (docs/methods.md).

Sun et al., *Improving Data Efficiency for LLM Reinforcement Fine-tuning Through Difficulty-targeted Online Data
Selection and Rollout Replay*. A variant: one linear projection of the base model's own embeddings, trained online,
where the authors train a network of three layers on another model's embeddings before the run.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from bapo.algorithms.randomness import generator_for
from bapo.algorithms.selectors.base import Floats, Indices, PromptPool, PromptSelector, State, first_by_weight, restored
from bapo.core.errors import ConfigError
from bapo.core.success_counts import SuccessCounts
from contrib.dots.attention import Predictor, new_predictor, normalised, predict, trained

TARGET = 0.5
BEFORE_ANY = 0.5
"""Prediction for every prompt while nothing was measured: all alike, so that the draw is uniform."""


class Dots(PromptSelector):
    """The prompts of `reference_every` steps come from one draw; none of them occurs twice in it."""

    embeds = True

    class Settings(PromptSelector.Settings):
        """Of measurements, predictor and draw."""

        reference_prompts: int = Field(256, ge=2)
        """K reference prompts, drawn uniformly and sampled only to measure their difficulty."""
        reference_every: int = Field(2, ge=1)
        """Steps between measurements; each selection covers these steps."""
        temperature: float = Field(1e-3, gt=0)
        """tau of p ~ exp(-|d - 1/2| / tau)."""
        projection_dim: int = Field(64, ge=1)
        """Dimension of the projected queries and keys of the attention."""
        projection_lr: float = Field(3e-3, gt=0)
        """Learning rate of projection and calibration."""
        projection_epochs: int = Field(20, ge=0)
        """Epochs over the newest references at each measurement; 0: projection and calibration are not trained."""
        embeddings: str | None = None
        """A .npz file with `ids` [N] and `embeddings` [N, D]; null: the learner computes them with the base model (mean
        last hidden state over each prompt) before the first step."""

    _own: Settings

    def __init__(self, own: Settings, pool: PromptPool, *, seed: int, batch_size: int) -> None:
        super().__init__(own, pool, seed=seed, batch_size=batch_size)
        if pool.embed is None:
            raise ConfigError(
                'algorithm.selector = "dots" needs embeddings of the prompts: python -m learner.model.embeddings'
            )
        self._embed = pool.embed
        self._embeddings: Floats | None = None
        self._predictor: Predictor | None = None
        self._predicted: Floats = np.full(len(pool), BEFORE_ANY)

    def references(self, step: int) -> Indices:
        """K prompts, drawn uniformly, at the first step of each selection."""
        if (step - 1) % self._own.reference_every:
            return np.empty(0, dtype=np.int64)
        num = min(self._own.reference_prompts, len(self._pool))
        return generator_for(self._seed, step, "dots_references").choice(len(self._pool), num, replace=False)

    def observe_references(self, step: int, success_counts: SuccessCounts) -> None:
        """Train on what they gave, and predict every prompt of the pool from it."""
        del step
        if len(success_counts.prompt_ids) < 2:
            return  # their groups failed for good: what was predicted before is the best there is
        settings, embeddings = self._own, self._features
        references = embeddings[self._pool.indices(success_counts.prompt_ids)]
        difficulty = success_counts.reward_sums.astype(np.float64) / success_counts.sizes
        self._predictor = trained(
            self._current, references, difficulty, epochs=settings.projection_epochs, lr=settings.projection_lr
        )
        self._predicted = predict(self._predictor, embeddings, references, difficulty)

    def propose(self, step: int, n: int) -> Indices:
        """The step's share of the draw, then what is after the shares of all steps, then the other shares."""
        every = self._own.reference_every
        turn = (step - 1) % every
        rng = generator_for(self._seed, step - turn, "dots")
        draw = first_by_weight(log_weights(self._predicted, self._own.temperature), len(self._pool), rng)
        start, end = turn * self._batch_size, (turn + 1) * self._batch_size
        behind = every * self._batch_size
        if behind > len(draw):
            return np.roll(draw, -start)[:n]
        return np.concatenate([draw[start:end], draw[behind:], draw[:start], draw[end:behind]])[:n]

    def state(self) -> State:
        """Predictions, projection, calibration, and Adam."""
        current = self._current
        return {
            "predicted": self._predicted.copy(),
            "parameters": current.parameters.copy(),
            "first": current.first.copy(),
            "second": current.second.copy(),
            "num_updates": np.array([current.num_updates], dtype=np.float64),
        }

    def restore(self, state: State) -> None:
        like = self._current
        self._predicted = restored(state, "predicted", self._predicted)
        self._predictor = Predictor(
            parameters=restored(state, "parameters", like.parameters),
            first=restored(state, "first", like.first),
            second=restored(state, "second", like.second),
            num_updates=int(restored(state, "num_updates", np.zeros(1))[0]),
            dims=like.dims,
        )

    @property
    def _features(self) -> Floats:
        """[N, D], read when they are needed first: the learner makes them at its start."""
        if self._embeddings is None:
            self._embeddings = normalised(self._embed())
        return self._embeddings

    @property
    def _current(self) -> Predictor:
        if self._predictor is None:
            rng = generator_for(self._seed, 0, "dots_projection")
            self._predictor = new_predictor(self._features.shape[1], self._own.projection_dim, rng)
        return self._predictor


def log_weights(predicted: Floats, temperature: float) -> Floats:
    """log p, without its constant: p ~ exp(-|d - 1/2| / tau)."""
    weights: Floats = -np.abs(predicted - TARGET) / temperature
    return weights
