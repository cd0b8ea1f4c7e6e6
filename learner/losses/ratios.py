"""Probability ratios, from log-probs in nats, and how they are clipped: PPO's pessimistic bound and the dual clip."""

from __future__ import annotations

import torch
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


Bound = Tensor | float | None


def clipped_surrogate(ratio_M: Tensor, advantage_M: Tensor, low: Bound, high: Bound) -> tuple[Tensor, Tensor]:
    """-min(rho A, clip(rho, low, high) A), and 1 where the clip changed it.

    Args:
        low, high: bounds of the ratio itself, one for all or one per token; None: not bounded on that side.
    """
    plain_M = -ratio_M * advantage_M
    bounded_M = -clamped(ratio_M, low, high) * advantage_M
    return torch.maximum(plain_M, bounded_M), (bounded_M > plain_M).detach().float()


def dual_clipped(
    loss_M: Tensor, clipped_M: Tensor, advantage_M: Tensor, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """The loss bounded by -c A where A < 0; without a bound as it was."""
    if dual_clip is None:
        return loss_M, clipped_M
    ceiling_M = -dual_clip * advantage_M
    beyond_M = (advantage_M < 0) & (loss_M > ceiling_M)
    return torch.where(beyond_M, ceiling_M, loss_M), torch.maximum(clipped_M, beyond_M.float())


def bounds_around_one(clip_low: float | None, clip_high: float | None) -> tuple[float | None, float | None]:
    """(1 - clip_low, 1 + clip_high); None where there is no bound."""
    return None if clip_low is None else 1 - clip_low, None if clip_high is None else 1 + clip_high


def clamped(ratio_M: Tensor, low: Bound, high: Bound) -> Tensor:
    """clip(rho, low, high), where None means unbounded."""
    # Both are tensors or both are numbers: torch knows no mixture, and its types none of either.
    return ratio_M if low is None and high is None else ratio_M.clamp(low, high)  # type: ignore[arg-type]
