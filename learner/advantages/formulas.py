"""Group-relative advantages (eq. 2) and their baselines.

Suffixes: G responses to one prompt, R responses of a batch.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bapo.core.types import PASS_REWARD, SAME_REWARD

AdvantageNorm = Literal["pop_var", "std_ddof1", "center"]
AdvantagePool = Literal["mixed", "split", "on_policy"]

BATCH_EPS = 1e-5
"""Added to the deviation over a batch (AReaL)."""


def group_advantages(rewards: ArrayLike, norm: AdvantageNorm, eps: float) -> NDArray[np.float64]:
    """A_j of each response from the rewards of its group; constant over the response's tokens.

    pop_var    (r - mean) / sqrt(var + eps)     eq. 2; the variance is the population one, as theorem 3.2 needs
    std_ddof1  (r - mean) / (std + eps)         verl and the authors' code; the sample standard deviation
    center     r - mean                         Dr. GRPO

    Args:
        rewards: [G] as shaped.
    Returns: [G] float64, sums to 0; all 0 if the rewards are equal. For a single response mean 0 and deviation 1 are
        used (verl), so its advantage is its reward.
    Raises: ValueError if there are no rewards or the norm is unknown.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"a group's rewards must be [G] with G >= 1, got shape {values.shape}")
    return _against(values, values, norm, eps)


def deviation(rewards: NDArray[np.float64], norm: AdvantageNorm, eps: float) -> float:
    """What centered rewards of a group are divided by: 1 if not normalized; a single reward has deviation 1 (verl)."""
    if norm == "center":
        return 1.0
    if len(rewards) == 1:
        variance = sample = 1.0
    elif np.ptp(rewards) <= SAME_REWARD:
        variance = sample = 0.0
    else:
        variance, sample = float(np.mean((rewards - float(rewards.mean())) ** 2)), float(rewards.std(ddof=1))
    return math.sqrt(variance + eps) if norm == "pop_var" else sample + eps


def pooled_advantages(
    rewards: ArrayLike, fresh: NDArray[np.bool_], pool: AdvantagePool, norm: AdvantageNorm, eps: float
) -> NDArray[np.float64]:
    """A_j of a group with rows that were not sampled for this batch (replayed or expert rows).

    mixed      all rows against all rows                                     LUFFY, ARPO
    split      fresh rows against fresh rows, the others against the others  RePO
    on_policy  all rows against the fresh rows; their sum is not 0           LUFFY's `grpo_split`

    Args:
        rewards: [G]; fresh: [G] sampled for this batch. Without both kinds every pool is `mixed`.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if pool == "mixed" or fresh.all() or not fresh.any():
        return group_advantages(values, norm, eps)
    if pool == "on_policy":
        return _against(values, values[fresh], norm, eps)
    advantages = np.empty_like(values)
    for rows in (fresh, ~fresh):
        advantages[rows] = group_advantages(values[rows], norm, eps)
    return advantages


def pass_k_weights(rewards: ArrayLike, k: int) -> NDArray[np.float64]:
    """[G] K C(w_-j, K - 1) / C(G - 1, K - 1), w_-j the incorrect ones of the other responses; K at most G.

    A success counts as far as K - 1 of the others would have failed: without bias the derivative K (1 - p)^(K - 1) of
    the expected pass@K with respect to the pass rate p (PKPO, arXiv 2505.15201).
    """
    is_wrong = np.asarray(rewards, dtype=np.float64) < PASS_REWARD
    k = min(k, len(is_wrong))
    others = is_wrong.sum() - is_wrong
    ways = math.comb(len(is_wrong) - 1, k - 1)
    return np.array([k * math.comb(int(wrong), k - 1) / ways for wrong in others])


def batch_normalised(advantage_R: ArrayLike, lengths_R: ArrayLike) -> NDArray[np.float64]:
    """(A - mean) / (std + 1e-5) over all tokens of a batch, on top of the normalization by group (AReaL).

    Args:
        advantage_R: [R] of each response; lengths_R: [R] its tokens, each of which counts.
    Returns: [R]; all 0 when all are equal.
    """
    values, tokens = np.asarray(advantage_R, dtype=np.float64), np.asarray(lengths_R, dtype=np.float64)
    if len(values) == 0 or np.ptp(values) == 0:
        return np.zeros_like(values)
    centered: NDArray[np.float64] = values - np.average(values, weights=tokens)
    scale = math.sqrt(float((tokens * centered**2).sum()) / (tokens.sum() - 1)) + BATCH_EPS
    return centered / scale


def _against(
    values: NDArray[np.float64], baseline: NDArray[np.float64], norm: AdvantageNorm, eps: float
) -> NDArray[np.float64]:
    """`values` less the mean of `baseline`, over its deviation."""
    if norm not in ("pop_var", "std_ddof1", "center"):
        raise ValueError(f"unknown advantage norm {norm!r}; use pop_var, std_ddof1 or center")
    # Equal floats and their mean can differ in the last bits, which a small eps would blow up.
    mean = 0.0 if len(baseline) == 1 else float(baseline[0] if np.ptp(baseline) <= SAME_REWARD else baseline.mean())
    centered: NDArray[np.float64] = values - mean
    centered[np.abs(centered) <= SAME_REWARD] = 0.0
    scale = deviation(baseline, norm, eps)
    return centered / scale if scale else centered


Float64s = NDArray[np.float64]


def overlong_penalty(lengths: ArrayLike, max_tokens: int, cache: int) -> Float64s:
    """DAPO's soft punishment: 0 up to max_tokens - cache, then falling linearly to -1 at max_tokens, and -1 beyond.

    Args:
        lengths: [G] tokens per response.
        cache: tokens before the limit over which it falls.
    """
    beyond = np.asarray(lengths, dtype=np.float64) - (max_tokens - cache)
    return -np.clip(beyond / cache, 0.0, 1.0)


def length_reward(rewards: ArrayLike, lengths: ArrayLike) -> Float64s:
    """Kimi k1.5's length reward: 1/2 for the shortest to -1/2 for the longest response, at most 0 for incorrect ones.

    Args:
        rewards, lengths: [G] of one group.
    Returns: [G]; all 0 when all have the same length.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    span = np.ptp(tokens)
    if span == 0:
        return np.zeros_like(tokens)
    credit = 0.5 - (tokens - tokens.min()) / span
    right = np.asarray(rewards, dtype=np.float64) >= PASS_REWARD
    return np.where(right, credit, np.minimum(0.0, credit))


WHITENING_EPS = 1e-8


def gae(
    rewards: ArrayLike,
    values: ArrayLike,
    *,
    gamma: float,
    gae_lambda: float,
    lengths: ArrayLike | None = None,
) -> tuple[Float64s, Float64s]:
    """Generalized advantage estimation (PPO): (advantages, returns), both [M]; no state follows a response's end.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lambda A_{t+1}        return_t = A_t + V_t

    Args:
        rewards: [M] reward of each token; a verifiable reward stands at the last one of its response.
        values: [M] V of the state before each token.
        lengths: [R] tokens per response, at least 1 each; without them all is one response.
    """
    reward, value = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
    sizes = np.array([len(value)]) if lengths is None else np.asarray(lengths)
    # Longest first, so that those with a token at a place from the end are always the first ones: one turn of the loop
    # per place, not per token.
    order = np.argsort(-sizes, kind="stable")
    ends, sizes = np.cumsum(sizes)[order], sizes[order]
    advantages = np.zeros_like(value)
    next_value, next_advantage = np.zeros(len(sizes)), np.zeros(len(sizes))
    for place in range(int(sizes.max(initial=0))):
        rows = slice(0, int(np.searchsorted(-sizes, -place)))
        t = ends[rows] - 1 - place
        delta = reward[t] + gamma * next_value[rows] - value[t]
        advantages[t] = delta + gamma * gae_lambda * next_advantage[rows]
        next_value[rows], next_advantage[rows] = value[t], advantages[t]
    return advantages, advantages + value


def whitened(values: ArrayLike) -> Float64s:
    """Mean 0 and sample variance 1 over all tokens: (x - mean) / sqrt(var_ddof1 + 1e-8). One token alone becomes 0."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) < 2:
        return np.zeros_like(array)
    centered: Float64s = array - array.mean()
    return centered / math.sqrt(float(array.var(ddof=1)) + WHITENING_EPS)
