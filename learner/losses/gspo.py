"""GSPO (arXiv 2507.18071): one ratio per response, the geometric mean over its tokens, clipped as in PPO.

    s = exp(mean_t log(pi_theta / anchor))      -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)

The ranges are much narrower than PPO's (3e-4, 4e-4), because s averages over the whole response. With the aggregation
seq_mean_token_mean the loss is the mean over responses. The gradient is that of verl's sg(s) pi / sg(pi).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo.config.objective import LossConfig
from learner.losses.base import PolicyLoss, Surrogate, TokenInputs
from learner.losses.ratios import bounds_around_one, clipped_surrogate, geometric_ratio

if TYPE_CHECKING:
    from torch import Tensor


class Gspo(PolicyLoss):
    """The loss `gspo`."""

    ignores = ("loss.dual_clip",)
    needs_bounds = True

    def __init__(self, settings: LossConfig, own: PolicyLoss.Settings) -> None:
        super().__init__(settings, own)
        self._low, self._high = bounds_around_one(settings.clip_low, settings.clip_high)

    def surrogate(self, logprobs_M: Tensor, anchor_M: Tensor, inputs: TokenInputs) -> Surrogate:
        """Each token carries its response's loss."""
        ratio_M = inputs.rows.spread(geometric_ratio(logprobs_M, anchor_M, inputs.rows))
        loss_M, clipped_M = clipped_surrogate(ratio_M, inputs.advantage_M, self._low, self._high)
        return Surrogate(loss_M=loss_M, ratio_M=ratio_M.detach(), clipped_M=clipped_M)
