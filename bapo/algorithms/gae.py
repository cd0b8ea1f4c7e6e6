"""Generalised advantage estimation and the value loss of PPO (spec B.18). Suffix: T tokens, in the order of sampling.

    delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lambda A_{t+1}        return_t = A_t + V_t

gamma = lambda = 1 (BA-PPO): A_t is the reward of the response less V_t, and every return is that reward.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64s = NDArray[np.float64]

WHITENING_EPS = 1e-8


def gae(
    rewards: ArrayLike, values: ArrayLike, *, gamma: float, gae_lambda: float, mask: ArrayLike | None = None
) -> tuple[Float64s, Float64s]:
    """(advantages, returns), both [T], of one response. Nothing follows its last token.

    Args:
        rewards: [T] reward of each token; a verifiable reward stands at the last one.
        values: [T] V of the state before each token.
        mask: [T] False for tokens that the policy did not sample (the output of a tool): value and advantage are
            carried across them. What stands there in the result has no meaning.
    """
    reward, value = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
    sampled = np.ones(len(value), dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
    advantages = np.zeros_like(value)
    next_value = next_advantage = 0.0
    for t in range(len(value) - 1, -1, -1):
        delta = reward[t] + gamma * next_value - value[t]
        advantages[t] = delta + gamma * gae_lambda * next_advantage
        if sampled[t]:
            next_value, next_advantage = value[t], advantages[t]
    return advantages, advantages + value


def whitened(values: ArrayLike) -> Float64s:
    """Mean 0 and sample variance 1 over all tokens: (x - mean) / sqrt(var_ddof1 + 1e-8). One token alone becomes 0."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) < 2:
        return np.zeros_like(array)
    centered: Float64s = array - array.mean()
    return centered / math.sqrt(float(array.var(ddof=1)) + WHITENING_EPS)
