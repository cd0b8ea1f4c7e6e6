"""PPO's clipped surrogate with clip-higher and dual clip: the loss of GRPO, DAPO, Dr. GRPO and BAPO (eqs. 1 and 3).

    -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), bounded by -c A for A < 0        rho = pi_theta / anchor

Without bounds it is -rho A, the importance-weighted policy gradient (ReLIFT).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo.config.objective import LossConfig
from learner.losses.base import PolicyLoss, Surrogate, TokenInputs
from learner.losses.ratios import bounds_around_one, clipped_surrogate, dual_clipped, ratio

if TYPE_CHECKING:
    from torch import Tensor


class Ppo(PolicyLoss):
    """The loss `ppo`."""

    def __init__(self, settings: LossConfig, own: PolicyLoss.Settings) -> None:
        super().__init__(settings, own)
        self._low, self._high = bounds_around_one(settings.clip_low, settings.clip_high)
        self._dual_clip = settings.dual_clip

    def surrogate(self, logprobs_M: Tensor, anchor_M: Tensor, inputs: TokenInputs) -> Surrogate:
        """Token by token."""
        ratio_M = ratio(logprobs_M, anchor_M)
        loss_M, clipped_M = clipped_surrogate(ratio_M, inputs.advantage_M, self._low, self._high)
        loss_M, clipped_M = dual_clipped(loss_M, clipped_M, inputs.advantage_M, self._dual_clip)
        return Surrogate(loss_M=loss_M, ratio_M=ratio_M.detach(), clipped_M=clipped_M)
