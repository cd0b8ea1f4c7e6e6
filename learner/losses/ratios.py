"""Probability ratios from log-probs in nats, and their clipping: PPO's pessimistic bound and the dual clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from learner.losses.base import Rows

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp(20) = 5e8: far beyond any sensible ratio, and far from the overflow of float32 at exp(88)."""


def log_ratio(numerator_M: Tensor, denominator_M: Tensor) -> Tensor:
    """log(numerator / denominator), clamped such that exp is finite."""
    return (numerator_M - denominator_M).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio(numerator_M: Tensor, denominator_M: Tensor) -> Tensor:
    """numerator / denominator of each token."""
    return log_ratio(numerator_M, denominator_M).exp()


def sequence_ratio(numerator_M: Tensor, denominator_M: Tensor, rows: Rows) -> Tensor:
    """[R] numerator / denominator of each whole response: the product over its tokens."""
    return rows.sum(numerator_M - denominator_M).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def geometric_ratio(numerator_M: Tensor, denominator_M: Tensor, rows: Rows) -> Tensor:
    """[R] the geometric mean of numerator / denominator over the tokens of each response."""
    # Clamp the mean, not its tokens.
    return rows.mean(numerator_M - denominator_M).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


Bound: TypeAlias = "Tensor | float | None"


def clipped_surrogate(ratio_M: Tensor, advantage_M: Tensor, low: Bound, high: Bound) -> tuple[Tensor, Tensor]:
    """-min(rho A, clip(rho, low, high) A), and 1 where clipping changed it.

    Args:
        low, high: bounds of the ratio, one for all tokens or one per token; None: unbounded.
    """
    plain_M = -ratio_M * advantage_M
    bounded_M = -clamped(ratio_M, low, high) * advantage_M
    return plain_M.maximum(bounded_M), (bounded_M > plain_M).detach().float()


def dual_clipped(
    loss_M: Tensor, clipped_M: Tensor, advantage_M: Tensor, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """The loss bounded by -c A where A < 0; unchanged without a bound."""
    if dual_clip is None:
        return loss_M, clipped_M
    ceiling_M = -dual_clip * advantage_M
    beyond_M = (advantage_M < 0) & (loss_M > ceiling_M)
    return ceiling_M.where(beyond_M, loss_M), clipped_M.maximum(beyond_M.float())


def bounds_around_one(clip_low: float | None, clip_high: float | None) -> tuple[float | None, float | None]:
    """(1 - clip_low, 1 + clip_high); None where there is no bound."""
    return None if clip_low is None else 1 - clip_low, None if clip_high is None else 1 + clip_high


def clamped(ratio_M: Tensor, low: Bound, high: Bound) -> Tensor:
    """clip(rho, low, high), where None means unbounded."""
    # Both are tensors or both are numbers: torch does not support a mix, and its type stubs do not express this.
    return ratio_M if low is None and high is None else ratio_M.clamp(low, high)  # type: ignore[arg-type]
