"""LUFFY (arXiv 2504.14945): policy shaping on expert tokens, so that unlikely ones keep their gradient.

    sampled tokens   PPO's surrogate; LUFFY has no clip: clip_low = clip_high = null
    expert tokens    -A f(pi_theta)      f(p) = p / (p + gamma)

pi_phi = 1 is the expert's probability. The weight on grad log pi is gamma p / (p + gamma)^2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from bapo.config.objective import LossConfig
from learner.losses.base import PolicyLoss, Surrogate, TokenInputs
from learner.losses.ratios import bounds_around_one, clipped_surrogate, ratio

if TYPE_CHECKING:
    from torch import Tensor


class Luffy(PolicyLoss):
    """The loss `luffy`."""

    ignores = ("loss.dual_clip",)
    takes_weight = False

    class Settings(PolicyLoss.Settings):
        """Of the shaping."""

        gamma: float = Field(0.1, gt=0)
        """gamma of f(p) = p / (p + gamma), the shaping of expert tokens."""

    @classmethod
    def check(cls, config: Any, own: Settings) -> Iterator[str]:
        yield from super().check(config, own)
        if config.loss.kl_coef and config.loss.kl_ref == "behavior":
            yield (
                "loss.name = luffy trains expert tokens, for which there is no KL to the rollout policy; set "
                "loss.kl_coef = 0 or loss.kl_ref = reference"
            )

    def __init__(self, settings: LossConfig, own: Settings) -> None:
        super().__init__(settings, own)
        self._low, self._high = bounds_around_one(settings.clip_low, settings.clip_high)
        self._gamma = own.gamma

    def surrogate(self, logprobs_M: Tensor, anchor_M: Tensor, inputs: TokenInputs) -> Surrogate:
        """Token by token."""
        expert_M = inputs.expert_M
        ratio_M = ratio(logprobs_M, anchor_M)
        sampled_M, clipped_M = clipped_surrogate(ratio_M, inputs.advantage_M, self._low, self._high)
        shaped_M = -inputs.advantage_M * shaped_probability(logprobs_M.exp(), self._gamma)
        return Surrogate(
            loss_M=shaped_M.where(expert_M, sampled_M),
            # Expert tokens have no ratio: no policy sampled them.
            ratio_M=ratio_M.masked_fill(expert_M, 1.0).detach(),
            clipped_M=clipped_M.masked_fill(expert_M, 0.0),
        )


def shaped_probability(probability_M: Tensor, gamma: float) -> Tensor:
    """f(p) = p / (p + gamma)."""
    return probability_M / (probability_M + gamma)
