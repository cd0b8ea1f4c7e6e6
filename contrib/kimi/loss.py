"""Kimi k1.5 (arXiv 2501.12599, section 2.3): policy mirror descent with a squared log-ratio of whole responses.

    loss of y = -A log pi_theta(y) + tau / 2 D^2      D = log pi_theta(y) - log pi_theta_t(y),  A = r - mean

The aggregation of the paper is seq_mean_token_sum. There is no ratio and no clip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from learner.losses.base import PolicyLoss, Surrogate, TokenInputs
from learner.losses.ratios import ratio

if TYPE_CHECKING:
    from torch import Tensor


class Kimi(PolicyLoss):
    """The loss `kimi`."""

    ignores = ("loss.clip_low", "loss.clip_high", "loss.dual_clip")
    takes_weight = False
    ratio_modes = ("decoupled", "official")
    always_counts = True

    class Settings(PolicyLoss.Settings):
        """Of the penalty."""

        tau: float = Field(0.1, gt=0)
        """tau of Kimi k1.5 (not published)."""

    _own: Settings

    def surrogate(self, logprobs_M: Tensor, anchor_M: Tensor, inputs: TokenInputs) -> Surrogate:
        """Each token carries its own log-prob and an equal share of its response's squared log-ratio."""
        rows = inputs.rows
        moved_R = rows.sum(logprobs_M - anchor_M)
        penalty_R = 0.5 * self._own.tau * moved_R**2 / rows.lengths(logprobs_M)
        return Surrogate(
            loss_M=-inputs.advantage_M * logprobs_M + rows.spread(penalty_R),
            ratio_M=ratio(logprobs_M.detach(), anchor_M),
            clipped_M=logprobs_M.new_zeros(len(logprobs_M)),
        )
