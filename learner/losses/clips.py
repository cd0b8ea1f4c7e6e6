"""Clip shapes: the pessimistic bound of PPO between two bounds, and the bound for negative advantages."""

from __future__ import annotations

import torch
from torch import Tensor

Bound = Tensor | float | None


def clipped_surrogate(ratio_M: Tensor, advantage_M: Tensor, low: Bound, high: Bound) -> tuple[Tensor, Tensor]:
    """-min(rho A, clip(rho, low, high) A), and 1 where the clip changed it.

    Args:
        low, high: bounds of the ratio itself, one for all or one per token; None: not bounded on that side.
    """
    plain_M = -ratio_M * advantage_M
    bounded_ratio_M = ratio_M
    if low is not None:
        bounded_ratio_M = torch.maximum(bounded_ratio_M, _like(low, ratio_M))
    if high is not None:
        bounded_ratio_M = torch.minimum(bounded_ratio_M, _like(high, ratio_M))
    bounded_M = -bounded_ratio_M * advantage_M
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


def _like(bound: Tensor | float, values_M: Tensor) -> Tensor:
    return bound if isinstance(bound, Tensor) else torch.full_like(values_M, bound)
