"""ADV: advantage per response from the rewards of a batch (docs/paper.md, Eq. 2).

stored rewards -> shaped (shaping) -> minus the baseline of their group -> times the weight of their entry
               -> normalized over the batch, if configured
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bapo.config.objective import LossConfig
from bapo.config.tree import Config
from bapo.core.types import Batch, BatchEntry, Outcome
from learner.advantages.base import Advantage
from learner.advantages.formulas import (
    batch_normalised,
    deviation,
    length_reward,
    overlong_penalty,
    pass_k_weights,
    pooled_advantages,
)
from learner.stale_tokens import stale_rows

Float64s = NDArray[np.float64]
Bools = NDArray[np.bool_]


def row_advantages(batch: Batch, config: Config) -> Float64s:
    """[R] advantage of each response; 0 for entries of kind sft."""
    settings = config.loss
    advantage_R = np.concatenate([_of_entry(entry, rewards, settings) for entry, rewards in _shaped(batch, config)])
    if settings.advantage_batch_norm:
        used_R = np.flatnonzero(~left_out(batch, config) & ~of_kind_sft(batch))
        lengths_R = np.concatenate([entry.group.lengths for entry in batch.entries])
        advantage_R[used_R] = batch_normalised(advantage_R[used_R], lengths_R[used_R])
    return advantage_R


def token_advantages(batch: Batch, advantage: Advantage, config: Config) -> Float64s:
    """[M] advantage of each token, of an advantage that credits tokens."""
    shaped = _shaped(batch, config)
    return np.concatenate([_by_tokens(entry, rewards, advantage, config.loss) for entry, rewards in shaped])


def _shaped(batch: Batch, config: Config) -> Iterator[tuple[BatchEntry, Float64s]]:
    return ((entry, shaped_rewards(entry, batch.step, config)) for entry in batch.entries)


def shaped_rewards(entry: BatchEntry, step: int, config: Config) -> Float64s:
    """[G] rewards used for advantages: scaled, with the configured penalties and bonuses."""
    settings, group = config.shaping, entry.group
    rewards = (group.rewards.astype(np.float64) + settings.shift) * settings.scale
    if settings.overlong_cache is not None:
        limit = config.rollout.max_response_tokens
        rewards += settings.overlong_factor * overlong_penalty(group.lengths, limit, settings.overlong_cache)
    if settings.length_weight and step > settings.length_warmup_steps:
        rewards += settings.length_weight * length_reward(group.rewards, group.lengths)
    return rewards


def left_out(batch: Batch, config: Config) -> Bools:
    """[R] responses excluded from loss and denominators: truncated ones, with `shaping.overlong_filter`; and episodes
    without a token that is young enough."""
    outcomes_R = np.concatenate([entry.group.outcomes for entry in batch.entries])
    truncated_R: Bools = np.equal(outcomes_R, Outcome.TRUNCATED) & config.shaping.overlong_filter
    return truncated_R | stale_rows(batch, config)


def of_kind_sft(batch: Batch) -> Bools:
    """[R] responses trained with cross-entropy."""
    return np.repeat([entry.kind == "sft" for entry in batch.entries], [entry.group.size for entry in batch.entries])


def _of_entry(entry: BatchEntry, rewards: Float64s, settings: LossConfig) -> Float64s:
    """[G] of one entry; `rewards`: as shaped."""
    if entry.kind == "sft":
        return np.zeros(entry.group.size)
    # A whole reused group (X3) is its own baseline: only rows joined to fresh ones form two pools.
    fresh = ~(entry.replayed_rows | entry.expert_rows)
    advantages = pooled_advantages(
        rewards, fresh, settings.advantage_pool, settings.advantage_norm, settings.advantage_eps
    )
    return entry.weight * pass_k_weights(entry.group.rewards, settings.advantage_pass_k) * advantages


def _by_tokens(entry: BatchEntry, rewards: Float64s, advantage: Advantage, settings: LossConfig) -> Float64s:
    """[T] of one entry; `rewards`: as shaped."""
    if entry.kind == "sft":
        return np.zeros(len(entry.group.token_ids))
    credit_M = advantage.credit(entry.group, rewards)
    scale = deviation(rewards, settings.advantage_norm, settings.advantage_eps)
    return entry.weight * (credit_M / scale if scale else credit_M)
