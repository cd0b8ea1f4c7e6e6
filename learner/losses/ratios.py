"""Probability ratios, from log-probs in nats."""

from __future__ import annotations

from torch import Tensor

from learner.losses.base import Rows

LOG_RATIO_LIMIT = 20.0
"""exp(20) = 5e8: no sensible ratio, but far from the overflow of float32 at exp(88)."""


def log_ratio(numerator_M: Tensor, denominator_M: Tensor) -> Tensor:
    """log(numerator / denominator), kept where exp is finite."""
    return (numerator_M - denominator_M).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio(numerator_M: Tensor, denominator_M: Tensor) -> Tensor:
    """numerator / denominator of each token."""
    return log_ratio(numerator_M, denominator_M).exp()


def sequence_ratio(numerator_M: Tensor, denominator_M: Tensor, rows: Rows) -> Tensor:
    """[R] numerator / denominator of each whole response: the product over its tokens."""
    return rows.sum(numerator_M - denominator_M).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def geometric_ratio(numerator_M: Tensor, denominator_M: Tensor, rows: Rows) -> Tensor:
    """[R] the geometric mean of numerator / denominator over the tokens of each response."""
    # The mean is bounded, not its tokens: each of them counts for what it is.
    return rows.mean(numerator_M - denominator_M).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
