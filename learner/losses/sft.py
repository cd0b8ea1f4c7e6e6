"""SFT: the negative log-likelihood of given tokens, -log pi_theta, whoever wrote them (`bapo sft`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from learner.losses.base import PolicyLoss, Surrogate, TokenInputs

if TYPE_CHECKING:
    from torch import Tensor


class Sft(PolicyLoss):
    """The loss `sft`. Advantages have no part in it."""

    takes_weight = False
    ratio_modes = ("direct",)
    always_counts = True

    def surrogate(self, logprobs_M: Tensor, anchor_M: Tensor, inputs: TokenInputs) -> Surrogate:
        """Token by token; the ratio is 1."""
        return Surrogate(
            loss_M=-logprobs_M,
            ratio_M=logprobs_M.new_ones(logprobs_M.shape),
            clipped_M=logprobs_M.new_zeros(logprobs_M.shape),
        )
