"""DPPO with a binary total-variation mask (prime-rl's default loss): masks tokens whose probability has moved too far.

    p = pi_theta, q = alpha:   -A p / q, dropped where (A > 0 and p - q > clip_high) or (A < 0 and p - q < -clip_low)

Its second term, 1e-3 (log p - log q)^2 on all tokens, is kl_estimator = k2 with kl_coef = 2e-3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo.config.objective import LossConfig
from learner.losses.base import PolicyLoss, Surrogate, TokenInputs
from learner.losses.ratios import ratio

if TYPE_CHECKING:
    from torch import Tensor


class Dppo(PolicyLoss):
    """The loss `dppo`."""

    ignores = ("loss.dual_clip",)
    needs_bounds = True
    ratio_modes = ("direct",)

    def __init__(self, settings: LossConfig, own: PolicyLoss.Settings) -> None:
        super().__init__(settings, own)
        assert settings.clip_low is not None
        assert settings.clip_high is not None
        self._fall, self._rise = settings.clip_low, settings.clip_high

    def surrogate(self, logprobs_M: Tensor, anchor_M: Tensor, inputs: TokenInputs) -> Surrogate:
        """Token by token."""
        ratio_M = ratio(logprobs_M, inputs.rollout_M)
        moved_M = (logprobs_M.exp() - inputs.rollout_M.exp()).detach()
        advantage_M = inputs.advantage_M
        dropped_M = ((advantage_M > 0) & (moved_M > self._rise)) | ((advantage_M < 0) & (moved_M < -self._fall))
        loss_M = ratio_M.new_zeros(ratio_M.shape).where(dropped_M, -advantage_M * ratio_M)
        return Surrogate(loss_M=loss_M, ratio_M=ratio_M.detach(), clipped_M=dropped_M.float())
