"""Estimates of KL(pi_theta | anchor) per token, differentiable in pi_theta's log-probs; d = log(pi_theta / anchor).

    k1       d                     unbiased, may be negative        tokens from pi_theta
    k2       d^2 / 2               biased by third order
    k3       e^-d - 1 + d          unbiased, >= 0                   tokens from pi_theta
    is_rev   e^d d - e^d + 1       unbiased, >= 0                   tokens from the anchor

All are d^2 / 2 to second order. Where e^d is taken, d is bounded (`log_ratio`). k3 of tokens that the anchor sampled is
biased (ADR 0022).
"""

from __future__ import annotations

from torch import Tensor

from learner.losses.ratios import log_ratio


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
"""By the name that `loss.kl_estimator` gives them."""
