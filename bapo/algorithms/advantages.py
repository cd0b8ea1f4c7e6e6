"""Group-relative advantages (eq. 2)."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

AdvantageNorm = Literal["pop_var", "std_ddof1", "center"]


def group_advantages(rewards: ArrayLike, norm: AdvantageNorm, eps: float) -> NDArray[np.float64]:
    """A_j of each response, from the rewards of its own group alone; constant over the response's tokens.

    pop_var    (r - mean) / sqrt(var + eps)     eq. 2; the variance is the population one, as theorem 3.2 needs
    std_ddof1  (r - mean) / (std + eps)         verl and the authors' code; the sample standard deviation
    center     r - mean                         Dr. GRPO

    Args:
        rewards: [G] in [0, 1], G >= 2.
    Returns: [G] float64, sums to 0; all 0 when the rewards are equal.
    Raises: ValueError when there are fewer than two rewards or the norm is unknown.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or len(values) < 2:
        raise ValueError(f"a group's rewards must be [G] with G >= 2, got shape {values.shape}")
    # The mean of equal floats can differ from them in the last bit, which a small eps would blow up.
    if np.ptp(values) == 0:
        return np.zeros_like(values)
    centered: NDArray[np.float64] = values - values.mean()
    if norm == "center":
        return centered
    if norm == "pop_var":
        scale = math.sqrt(float(np.mean(centered**2)) + eps)
    elif norm == "std_ddof1":
        scale = float(centered.std(ddof=1)) + eps
    else:
        raise ValueError(f"unknown advantage norm {norm!r}; write pop_var, std_ddof1 or center")
    return centered / scale
