"""CISPO (arXiv 2506.13585): log pi weighted by a clipped, detached ratio, so that every token keeps its gradient.

    -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi_theta          rho = pi_theta / anchor

MiniMax bounds the ratio only from above: clip_low = null.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo.config.objective import LossConfig
from learner.losses.base import PolicyLoss, Surrogate, TokenInputs
from learner.losses.ratios import bounds_around_one, clamped, ratio

if TYPE_CHECKING:
    from torch import Tensor


class Cispo(PolicyLoss):
    """The loss `cispo`."""

    ignores = ("loss.dual_clip",)

    def __init__(self, settings: LossConfig, own: PolicyLoss.Settings) -> None:
        super().__init__(settings, own)
        self._low, self._high = bounds_around_one(settings.clip_low, settings.clip_high)

    def surrogate(self, logprobs_M: Tensor, anchor_M: Tensor, inputs: TokenInputs) -> Surrogate:
        """Token by token."""
        ratio_M = ratio(logprobs_M.detach(), anchor_M)
        bounded_M = clamped(ratio_M, self._low, self._high)
        return Surrogate(
            loss_M=-bounded_M * inputs.advantage_M * logprobs_M,
            ratio_M=ratio_M,
            clipped_M=((bounded_M != ratio_M) & (inputs.advantage_M != 0)).float(),
        )
