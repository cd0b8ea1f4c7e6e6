"""Rewards as the advantages see them (docs/methods.md). The stored rewards are never changed.

Suffix: G responses to one prompt.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64s = NDArray[np.float64]

RIGHT = 1.0 - 1e-6
"""A response is right when its reward is 1, up to the rounding of float32."""


def overlong_penalty(lengths: ArrayLike, max_tokens: int, cache: int) -> Float64s:
    """DAPO's soft punishment: 0 up to max_tokens - cache, then falling linearly to -1 at max_tokens, and -1 beyond.

    Args:
        lengths: [G] tokens per response.
        cache: tokens before the limit over which it falls.
    """
    beyond = np.asarray(lengths, dtype=np.float64) - (max_tokens - cache)
    return -np.clip(beyond / cache, 0.0, 1.0)


def length_reward(rewards: ArrayLike, lengths: ArrayLike) -> Float64s:
    """Kimi k1.5's length reward: 1/2 for the shortest of the group to -1/2 for the longest; a wrong one gains nothing.

    Args:
        rewards, lengths: [G] of one group.
    Returns: [G]; all 0 when all have the same length.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    span = np.ptp(tokens)
    if span == 0:
        return np.zeros_like(tokens)
    credit = 0.5 - (tokens - tokens.min()) / span
    right = np.asarray(rewards, dtype=np.float64) >= RIGHT
    return np.where(right, credit, np.minimum(0.0, credit))
