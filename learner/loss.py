"""The surrogate objective (eqs. 1-3; spec A.6), as sums over response tokens.

Suffixes: M response tokens of a micro-batch, R responses.

Four policies meet at each token, all as log-probabilities in nats:

    logprobs      pi_theta       being trained
    anchor        the policy that the trust region is centred on; the ratio mode decides which (`anchors.py`)
    rollout       alpha          sampled the token (for a reused group: alpha_B)
    reference     pi_ref         frozen base model, only for kl_ref = reference

    rho = pi_theta / anchor      w = min(anchor / alpha, C)  (1 in mode `direct`, where anchor = alpha)
    surrogate = -w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), bounded by -c A for A < 0 before w
    L = agg(surrogate) + kl_coef agg(kl) - entropy_coef agg(H)

Each aggregation is a weight per token over the whole mini-batch of all ranks, so L is a plain sum over tokens: it
does not depend on how tokens are packed, ordered or dealt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bapo.config.tree import LossConfig

LOG_RATIO_LIMIT = 20.0
"""exp(20) = 5e8: no sensible ratio, but far from the overflow of float32 at exp(88)."""

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "const_len"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenInputs:
    """What the loss of each response token is made of, besides the policy. All [M] float32."""

    anchor_M: Tensor
    """NaN: not known, because this pass is the first at theta_t, so the policy itself is the anchor."""
    rollout_M: Tensor
    reference_M: Tensor | None
    advantage_M: Tensor
    weight_M: Tensor
    """From `token_weights`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLosses:
    """The parts of the objective per token. All [M] float32."""

    surrogate_M: Tensor
    kl_M: Tensor
    ratio_M: Tensor
    """rho, detached."""
    clipped_M: Tensor
    """1 where clipping changed the objective."""


def token_weights(
    lengths_R: NDArray[np.int64], aggregation: Aggregation, max_response_tokens: int
) -> NDArray[np.float64]:
    """[R] weight of each token of a response in the mini-batch's loss.

    token_mean           1 / all tokens                      DAPO
    seq_mean_token_mean  1 / (responses * own length)        GRPO, eq. 1
    seq_mean_token_sum   1 / responses
    const_len            1 / (responses * L_max)             Dr. GRPO

    Args:
        lengths_R: tokens of every response of the mini-batch, on all ranks.
    """
    num_responses = len(lengths_R)
    if aggregation == "token_mean":
        return np.full(num_responses, 1.0 / lengths_R.sum())
    if aggregation == "seq_mean_token_mean":
        return 1.0 / (num_responses * lengths_R.astype(np.float64))
    if aggregation == "seq_mean_token_sum":
        return np.full(num_responses, 1.0 / num_responses)
    return np.full(num_responses, 1.0 / (num_responses * max_response_tokens))


def token_losses(logprobs_M: Tensor, inputs: TokenInputs, settings: LossConfig) -> TokenLosses:
    """Surrogate and KL of each token; differentiable in `logprobs_M` alone."""
    anchor_M = torch.where(inputs.anchor_M.isnan(), logprobs_M.detach(), inputs.anchor_M)
    ratio_M = _ratio(logprobs_M, anchor_M)
    surrogate_M, clipped_M = clipped_surrogate(ratio_M, inputs.advantage_M, settings)
    if settings.ratio_mode != "direct":
        surrogate_M = surrogate_M * importance_weight(anchor_M, inputs.rollout_M, settings.importance_cap)
    if inputs.reference_M is not None:
        kl_M = kl_to_reference(logprobs_M, inputs.reference_M)
    else:
        kl_M = kl_to_behaviour(logprobs_M, inputs.rollout_M)
    return TokenLosses(surrogate_M=surrogate_M, kl_M=kl_M, ratio_M=ratio_M.detach(), clipped_M=clipped_M)


def objective(losses: TokenLosses, entropy_M: Tensor, weight_M: Tensor, settings: LossConfig) -> Tensor:
    """This micro-batch's part of L: a scalar; the parts of all micro-batches and ranks add up to L."""
    loss_M = losses.surrogate_M
    if settings.kl_coef:
        loss_M = loss_M + settings.kl_coef * losses.kl_M
    if settings.entropy_coef:
        loss_M = loss_M - settings.entropy_coef * entropy_M
    return (loss_M * weight_M).sum()


def clipped_surrogate(ratio_M: Tensor, advantage_M: Tensor, settings: LossConfig) -> tuple[Tensor, Tensor]:
    """Clip-higher with dual clip: the loss of each token before its importance weight, and where clipping bites."""
    plain_M = -ratio_M * advantage_M
    clipped_ratio_M = ratio_M.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    bounded_M = -clipped_ratio_M * advantage_M
    loss_M = torch.maximum(plain_M, bounded_M)
    clipped_M = (bounded_M > plain_M).detach()
    if settings.dual_clip is not None:
        ceiling_M = -settings.dual_clip * advantage_M
        beyond_M = (advantage_M < 0) & (loss_M > ceiling_M)
        loss_M = torch.where(beyond_M, ceiling_M, loss_M)
        clipped_M = clipped_M | beyond_M
    return loss_M, clipped_M.float()


def importance_weight(anchor_M: Tensor, rollout_M: Tensor, cap: float | None) -> Tensor:
    """min(anchor / alpha, C) per token, without gradient: corrects for who sampled the token."""
    weight_M = _ratio(anchor_M, rollout_M).detach()
    return weight_M if cap is None else weight_M.clamp(max=cap)


def kl_to_behaviour(logprobs_M: Tensor, rollout_M: Tensor) -> Tensor:
    """rho log rho - rho + 1 with rho = pi_theta / alpha: unbiased per token for KL(pi_theta | alpha) when y ~ alpha.

    The usual k3 assumes y ~ pi_theta and is biased here (ADR 0022).
    """
    log_ratio_M = (logprobs_M - rollout_M).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_M = log_ratio_M.exp()
    return ratio_M * log_ratio_M - ratio_M + 1


def kl_to_reference(logprobs_M: Tensor, reference_M: Tensor) -> Tensor:
    """k3 of eq. 1: pi_ref / pi_theta - 1 - log(pi_ref / pi_theta)."""
    log_ratio_M = (reference_M - logprobs_M).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio_M.exp() - log_ratio_M - 1


def _ratio(numerator_M: Tensor, denominator_M: Tensor) -> Tensor:
    return (numerator_M - denominator_M).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
