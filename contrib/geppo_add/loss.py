"""Generalized PPO with an additive center (ReMix, arXiv 2507.06892; after GePPO): the clip range moves with pi_theta_t.

    -min(r A, clip(r, c - clip_low, c + clip_high) A)      r = pi_theta / alpha,  c = pi_theta_t / alpha

For a fresh token c = 1, so this is PPO. There is no importance weight: r is the full correction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo.config.objective import LossConfig
from learner.losses.base import PolicyLoss, Surrogate, TokenInputs
from learner.losses.ratios import clipped_surrogate, ratio

if TYPE_CHECKING:
    from torch import Tensor


class GeppoAdd(PolicyLoss):
    """The loss `geppo_add`."""

    ignores = ("loss.dual_clip",)
    takes_weight = False
    needs_bounds = True
    ratio_modes = ("decoupled", "official")

    def __init__(self, settings: LossConfig, own: PolicyLoss.Settings) -> None:
        super().__init__(settings, own)
        assert settings.clip_low is not None
        assert settings.clip_high is not None
        self._below, self._above = settings.clip_low, settings.clip_high

    def surrogate(self, logprobs_M: Tensor, anchor_M: Tensor, inputs: TokenInputs) -> Surrogate:
        """Token by token."""
        ratio_M, centre_M = ratio(logprobs_M, inputs.rollout_M), ratio(anchor_M, inputs.rollout_M)
        low_M, high_M = centre_M - self._below, centre_M + self._above
        loss_M, clipped_M = clipped_surrogate(ratio_M, inputs.advantage_M, low_M, high_M)
        return Surrogate(loss_M=loss_M, ratio_M=ratio_M.detach(), clipped_M=clipped_M)
