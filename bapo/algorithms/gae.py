"""Generalised advantage estimation of PPO. Suffixes: M tokens of all responses, in
the order of sampling; R responses.

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
    rewards: ArrayLike,
    values: ArrayLike,
    *,
    gamma: float,
    gae_lambda: float,
    lengths: ArrayLike | None = None,
    mask: ArrayLike | None = None,
) -> tuple[Float64s, Float64s]:
    """(advantages, returns), both [M], of responses one after the other. Nothing follows a response's last token.

    Args:
        rewards: [M] reward of each token; a verifiable reward stands at the last one of its response.
        values: [M] V of the state before each token.
        lengths: [R] tokens per response, at least 1 each; without them all is one response.
        mask: [M] False for tokens that the policy did not sample (the output of a tool): value and advantage are
            carried across them. What stands there in the result has no meaning.
    """
    reward, value = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
    sampled = np.ones(len(value), dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
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
        next_value[rows] = np.where(sampled[t], value[t], next_value[rows])
        next_advantage[rows] = np.where(sampled[t], advantages[t], next_advantage[rows])
    return advantages, advantages + value


def whitened(values: ArrayLike) -> Float64s:
    """Mean 0 and sample variance 1 over all tokens: (x - mean) / sqrt(var_ddof1 + 1e-8). One token alone becomes 0."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) < 2:
        return np.zeros_like(array)
    centered: Float64s = array - array.mean()
    return centered / math.sqrt(float(array.var(ddof=1)) + WHITENING_EPS)
