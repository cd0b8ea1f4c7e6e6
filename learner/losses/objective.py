"""The objective (docs/paper.md, Eqs. 1-3): a surrogate of `learner/losses`, its importance weight, KL and entropy.

Suffixes: M response tokens of a micro-batch, R responses.

Four policies per token, all as log-probabilities in nats:

    logprobs      pi_theta       being trained
    anchor        center of the trust region, chosen by the ratio mode (`update/step.py`)
    rollout       alpha          sampled the token (for a reused group: alpha_B)
    reference     pi_ref         frozen base model, only for kl_ref = reference and convex

    rho = pi_theta / anchor      w = min(anchor / alpha, C)  (1 in mode `direct`, where anchor = alpha)
    L = agg(w surrogate(rho, A)) + kl_coef agg(kl) - entropy_coef agg(H)

Each aggregation is a weight per token over the whole mini-batch of all ranks, so L is a plain sum over tokens,
independent of packing, order and distribution over ranks.

Importance weight w, if the behavior policy is not the anchor (AReaL `ppo_actor_loss_fn` and
`apply_rejection_sampling`; verl `rollout_corr_helper`; TRL):

    level     token      w_t = anchor_t / alpha_t
              sequence   the product over the response, for each of its tokens
              geometric  the geometric mean over the response
    mode      truncate   min(w, C)
              mask       w if within [floor, C], else the token is excluded
    veto      a response with any token of anchor / alpha below the bound is excluded, at any level

Estimators of KL(pi_theta | anchor) per token, with d = log(pi_theta / anchor); all are d^2 / 2 to second order:

    k1       d                     unbiased, may be negative        tokens from pi_theta
    k2       d^2 / 2               biased by third order
    k3       e^-d - 1 + d          unbiased, >= 0                   tokens from pi_theta; biased for the anchor's
    is_rev   e^d d - e^d + 1       unbiased, >= 0                   tokens from the anchor
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bapo.config.objective import Aggregation, LossConfig
from bapo.core.errors import ConfigError
from learner.losses.base import PolicyLoss, Rows, Surrogate, TokenInputs, load_loss
from learner.losses.ratios import geometric_ratio, log_ratio, ratio, sequence_ratio

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLosses:
    """The parts of the objective per token. All [M] float32."""

    surrogate_M: Tensor
    """Includes the importance weight."""
    kl_M: Tensor
    ratio_M: Tensor
    """rho, detached."""
    clipped_M: Tensor
    """1 where clipping changed the objective."""


class Objective:
    """A loss with its importance weight, its KL term and its entropy."""

    def __init__(self, settings: LossConfig, loss: PolicyLoss | None = None) -> None:
        """`loss`: None: the one that the settings name."""
        self.settings = settings
        self.loss = loss or load_loss(settings)

    @property
    def needs_anchors(self) -> bool:
        """Whether the anchors of a mini-batch must be known before its own pass."""
        return self.loss.whole_minibatch or self.settings.importance_denominator == "kept"

    def fitted(self, logprobs_M: Tensor, inputs: TokenInputs) -> Objective:
        """With its loss fitted to one mini-batch, given all computed tokens of all ranks."""
        return Objective(self.settings, self.loss.fitted(logprobs_M, known_anchor(logprobs_M, inputs), inputs))

    def token_losses(self, logprobs_M: Tensor, inputs: TokenInputs) -> TokenLosses:
        """Surrogate and KL of each token; differentiable with respect to `logprobs_M` only."""
        settings, anchor_M = self.settings, known_anchor(logprobs_M, inputs)
        found = self.loss.surrogate(logprobs_M, anchor_M, inputs)
        if not isinstance(found, Surrogate):
            raise ConfigError(
                f"loss.name = {settings.name}: surrogate returned a {type(found).__name__}; it must return "
                "learner.losses.base.Surrogate(loss_M=..., ratio_M=..., clipped_M=...)"
            )
        surrogate_M = found.loss_M
        if takes_importance_weight(settings):
            weight_M, kept_M = importance_weight(anchor_M, inputs.rollout_M, inputs.rows, settings)
            surrogate_M = surrogate_M * weight_M
            if kept_M is not None:  # where, not a product: 0 times an infinite loss is NaN
                surrogate_M = torch.where(kept_M, surrogate_M, torch.zeros_like(surrogate_M))
        return TokenLosses(
            surrogate_M=surrogate_M,
            kl_M=_kl(logprobs_M, anchor_M, inputs, settings),
            ratio_M=found.ratio_M,
            clipped_M=found.clipped_M,
        )

    def total(self, losses: TokenLosses, entropy_M: Tensor, weight_M: Tensor) -> Tensor:
        """This micro-batch's part of L: a scalar; the parts of all micro-batches and ranks add up to L."""
        loss_M = losses.surrogate_M
        if self.settings.kl_coef:
            loss_M = loss_M + self.settings.kl_coef * losses.kl_M
        if self.settings.entropy_coef:
            loss_M = loss_M - self.settings.entropy_coef * entropy_M
        return (loss_M * weight_M).sum()


def known_anchor(logprobs_M: Tensor, inputs: TokenInputs) -> Tensor:
    """The anchor, and where it is not known the policy itself, without gradient."""
    policy_M = logprobs_M.detach()
    if inputs.policy_share_M is not None:
        return inputs.anchor_M + inputs.policy_share_M * (policy_M - inputs.anchor_M)
    return torch.where(inputs.anchor_M.isnan(), policy_M, inputs.anchor_M)


def takes_importance_weight(settings: LossConfig) -> bool:
    """Whether w multiplies the surrogate. In mode `direct` the ratio already is the full correction."""
    return settings.ratio_mode != "direct" and settings.importance_level != "none"


def _kl(logprobs_M: Tensor, anchor_M: Tensor, inputs: TokenInputs, settings: LossConfig) -> Tensor:
    """KL per token: to alpha, to pi_ref, or to a mix of pi_ref and pi_theta_t (ReMix)."""
    if settings.kl_ref == "behavior" or inputs.reference_M is None:
        # Without a reference kl_coef is 0, but the KL to alpha is still recorded.
        name = settings.kl_estimator if settings.kl_ref == "behavior" else None
        kl_M = ESTIMATORS[name or "is_rev"](logprobs_M, inputs.rollout_M)
        return torch.where(inputs.expert_M, torch.zeros_like(kl_M), kl_M)  # no policy sampled an expert's token
    estimate = ESTIMATORS[settings.kl_estimator or "k3"]
    kl_M = estimate(logprobs_M, inputs.reference_M)
    if settings.kl_ref == "reference" or inputs.reference_share == 1.0:
        return kl_M
    return inputs.reference_share * kl_M + (1 - inputs.reference_share) * estimate(logprobs_M, anchor_M)


def k1(logprobs_M: Tensor, anchor_M: Tensor) -> Tensor:
    """log(pi_theta / anchor)."""
    return logprobs_M - anchor_M


def k2(logprobs_M: Tensor, anchor_M: Tensor) -> Tensor:
    """Half the squared log-ratio."""
    return 0.5 * (logprobs_M - anchor_M) ** 2


def k3(logprobs_M: Tensor, anchor_M: Tensor) -> Tensor:
    """anchor / pi_theta - 1 - log(anchor / pi_theta): the KL term of eq. 1."""
    inverse_M = log_ratio(anchor_M, logprobs_M)
    return inverse_M.exp() - inverse_M - 1


def is_rev(logprobs_M: Tensor, anchor_M: Tensor) -> Tensor:
    """rho log rho - rho + 1 with rho = pi_theta / anchor: the KL term of eq. 3, whose tokens alpha sampled."""
    log_ratio_M = log_ratio(logprobs_M, anchor_M)
    ratio_M = log_ratio_M.exp()
    return ratio_M * log_ratio_M - ratio_M + 1


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "is_rev": is_rev}
"""Keyed by `loss.kl_estimator`."""


def importance_weight(
    anchor_M: Tensor, rollout_M: Tensor, rows: Rows, settings: LossConfig
) -> tuple[Tensor, Tensor | None]:
    """[M] detached w, and [M] bool mask of the tokens kept in the loss (None: all)."""
    anchor_M = anchor_M.detach()
    weight_M = _raw_weight(anchor_M, rollout_M, rows, settings.importance_level)
    kept_M = None
    if settings.importance_mode == "mask":
        kept_M = _within(weight_M, settings.importance_floor, settings.importance_cap)
    elif settings.importance_cap is not None:
        weight_M = weight_M.clamp(max=settings.importance_cap)
    if settings.importance_veto is not None:
        stays_M = _without_veto(anchor_M, rollout_M, rows, settings.importance_veto)
        kept_M = stays_M if kept_M is None else kept_M & stays_M
    return weight_M, kept_M


def _raw_weight(anchor_M: Tensor, rollout_M: Tensor, rows: Rows, level: str) -> Tensor:
    if level == "sequence":
        return rows.spread(sequence_ratio(anchor_M, rollout_M, rows))
    if level == "geometric":
        return rows.spread(geometric_ratio(anchor_M, rollout_M, rows))
    return ratio(anchor_M, rollout_M)


def _within(weight_M: Tensor, floor: float | None, cap: float | None) -> Tensor:
    kept_M = torch.ones_like(weight_M, dtype=torch.bool)
    if floor is not None:
        kept_M &= weight_M >= floor
    if cap is not None:
        kept_M &= weight_M <= cap
    return kept_M


def _without_veto(anchor_M: Tensor, rollout_M: Tensor, rows: Rows, veto: float) -> Tensor:
    below_R = rows.sum((ratio(anchor_M, rollout_M) < veto).float())
    return rows.spread(below_R) == 0


def token_weights(
    lengths_R: Int64s,
    aggregation: Aggregation,
    max_response_tokens: int,
    *,
    group_R: Int64s | None = None,
    replayed_R: NDArray[np.bool_] | None = None,
) -> Float64s:
    """[R] weight of each token of a response in the mini-batch's loss.

    token_mean           1 / all tokens                                      DAPO
    seq_mean_token_mean  1 / (responses * own length)                        GRPO, eq. 1
    seq_mean_token_sum   1 / responses                                       Kimi k1.5
    const_len            1 / (responses * L_max)                             Dr. GRPO
    group_const_len      1 / (groups * L_max)                                LUFFY
    two_term             1 / (groups * own kind's rows in the group * own length)    RePO: fresh plus replayed

    Args:
        lengths_R: tokens of every response of the mini-batch, on all ranks; 0 for one that is left out whole.
        group_R: which group each belongs to, for the last two.
        replayed_R: which were sampled for an earlier batch, for the last.
    Returns: 0 where the length is 0.
    """
    counts_R = lengths_R > 0
    weights_R = np.zeros(len(lengths_R))
    if not counts_R.any():
        return weights_R
    lengths = lengths_R[counts_R].astype(np.float64)
    if aggregation == "token_mean":
        weights_R[counts_R] = 1.0 / lengths.sum()
    elif aggregation == "seq_mean_token_mean":
        weights_R[counts_R] = 1.0 / (len(lengths) * lengths)
    elif aggregation == "seq_mean_token_sum":
        weights_R[counts_R] = 1.0 / len(lengths)
    elif aggregation == "const_len":
        weights_R[counts_R] = 1.0 / (len(lengths) * max_response_tokens)
    else:
        weights_R[counts_R] = _by_group(aggregation, lengths, max_response_tokens, group_R, replayed_R, counts_R)
    return weights_R


def _by_group(
    aggregation: str,
    lengths: Float64s,
    max_response_tokens: int,
    group_R: Int64s | None,
    replayed_R: NDArray[np.bool_] | None,
    counts_R: NDArray[np.bool_],
) -> Float64s | float:
    assert group_R is not None
    groups, number_R = np.unique(group_R[counts_R], return_inverse=True)
    if aggregation == "group_const_len":
        return 1.0 / (len(groups) * max_response_tokens)
    assert replayed_R is not None
    kind_R = 2 * number_R + replayed_R[counts_R]
    rows_R = np.bincount(kind_R)[kind_R]
    return 1.0 / (len(groups) * rows_R * lengths)
