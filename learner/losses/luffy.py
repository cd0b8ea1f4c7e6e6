"""LUFFY (arXiv 2504.14945): policy shaping on expert tokens, so that unlikely ones keep their gradient.

    sampled tokens   PPO's surrogate; LUFFY has no clip: clip_low = clip_high = null
    expert tokens    -A f(pi_theta)      f(p) = p / (p + gamma)

pi_phi = 1 is the expert's probability. The weight on grad log pi is gamma p / (p + gamma)^2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bapo.config.objective import LossConfig
from learner.losses.base import PolicyLoss, Surrogate, TokenInputs
from learner.losses.ratios import bounds_around_one, clipped_surrogate, ratio


class Luffy(PolicyLoss):
    """The loss `luffy`."""

    def __init__(self, settings: LossConfig) -> None:
        self._low, self._high = bounds_around_one(settings.clip_low, settings.clip_high)
        self._gamma = settings.luffy_gamma

    def surrogate(self, logprobs_M: Tensor, anchor_M: Tensor, inputs: TokenInputs) -> Surrogate:
        """Token by token."""
        expert_M = inputs.expert_M
        ratio_M = ratio(logprobs_M, anchor_M)
        sampled_M, clipped_M = clipped_surrogate(ratio_M, inputs.advantage_M, self._low, self._high)
        shaped_M = -inputs.advantage_M * shaped_probability(logprobs_M.exp(), self._gamma)
        return Surrogate(
            loss_M=torch.where(expert_M, shaped_M, sampled_M),
            # Expert tokens have no ratio: no policy sampled them.
            ratio_M=torch.where(expert_M, torch.ones_like(ratio_M), ratio_M).detach(),
            clipped_M=torch.where(expert_M, torch.zeros_like(clipped_M), clipped_M),
        )


def shaped_probability(probability_M: Tensor, gamma: float) -> Tensor:
    """f(p) = p / (p + gamma)."""
    return probability_M / (probability_M + gamma)


make_loss = Luffy
