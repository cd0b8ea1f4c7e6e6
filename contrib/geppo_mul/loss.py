"""Generalized PPO with a multiplicative center (DOTS with rollout replay, its `compute_policy_loss_temp`).

    -min(r A, clip(r, c (1 - clip_low), c (1 + clip_high)) A)      r = pi_theta / alpha,  c = pi_theta_t / alpha

Equal to the decoupled loss without truncation: c times PPO's loss around pi_theta_t.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo.config.objective import LossConfig
from learner.losses.base import PolicyLoss, Surrogate, TokenInputs
from learner.losses.ratios import bounds_around_one, clipped_surrogate, ratio

if TYPE_CHECKING:
    from torch import Tensor


class GeppoMul(PolicyLoss):
    """The loss `geppo_mul`."""

    takes_weight = False
    needs_bounds = True
    ratio_modes = ("decoupled", "official")

    def __init__(self, settings: LossConfig, own: PolicyLoss.Settings) -> None:
        super().__init__(settings, own)
        low, high = bounds_around_one(settings.clip_low, settings.clip_high)
        assert low is not None
        assert high is not None
        self._low, self._high = low, high

    def surrogate(self, logprobs_M: Tensor, anchor_M: Tensor, inputs: TokenInputs) -> Surrogate:
        """Token by token."""
        ratio_M, centre_M = ratio(logprobs_M, inputs.rollout_M), ratio(anchor_M, inputs.rollout_M)
        low_M, high_M = centre_M * self._low, centre_M * self._high
        loss_M, clipped_M = clipped_surrogate(ratio_M, inputs.advantage_M, low_M, high_M)
        return Surrogate(loss_M=loss_M, ratio_M=ratio_M.detach(), clipped_M=clipped_M)
