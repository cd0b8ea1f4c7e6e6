"""Theorem 3.2 and what can be measured of it: the constants K_i, the bound, and divergences from log-probs.

Two looseness remarks (spec A.10): for rewards in [0, 1] every "2 TV" of the theorem may be a "TV"; and eq. 12 with
c1(1 - c1) is too small for c1 > 1/G, because mu may also be (G-1)/G: `k2_on_grid` is the constant that holds.

Estimators take y ~ alpha: d = log pi - log alpha on response tokens, rho = e^d, D = sum of d over one response.
Arrays are columnar like a group's: [T] tokens, cut by lengths [R] into R responses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_LOG_RATIO = 20.0
"""d is clamped to +-20 nats, so that e^d stays finite and one token cannot be the whole estimate."""


def smoothed_std(mu: float, eps: float) -> float:
    """sigma = sqrt(mu (1 - mu) + eps): standard deviation of binary rewards with mean mu, smoothed."""
    return math.sqrt(mu * (1 - mu) + eps)


def stability_constant(sigma: float) -> float:
    """K = (1 - sigma) / sigma. Least at mu = 1/2, where it is 1 (proposition A.3)."""
    return (1 - sigma) / sigma


def k1(group_size: int, eps: float = 0.0) -> float:
    """K_1 of X1 (eq. 11): the worst group has mu = 1/G."""
    return stability_constant(math.sqrt((group_size - 1) / group_size**2 + eps))


def k2(c1: float, eps: float = 0.0) -> float:
    """K_2 of X2 as printed (eq. 12)."""
    return stability_constant(smoothed_std(c1, eps))


def k2_on_grid(c1: float, group_size: int, eps: float = 0.0) -> float:
    """K_2 that holds for every level c1 < k/G < 1. Raises: ValueError if there is none."""
    sigmas = [smoothed_std(k / group_size, eps) for k in range(1, group_size) if k / group_size > c1]
    if not sigmas:
        raise ValueError(f"no level of G={group_size} lies between c1={c1} and 1")
    return stability_constant(min(sigmas))


def k3(c2: float, c3: float, eps: float = 0.0) -> float:
    """K_3 of X3 (eq. 13): the worse edge of the window."""
    return stability_constant(min(smoothed_std(c2, eps), smoothed_std(c3, eps)))


def improvement_bound(
    *, j_theta: float, j_alpha: float, mu: float, tv_theta: float, tv_current: float, eps: float, factor: float = 2.0
) -> float:
    """Lower bound of J(pi_theta) - J(pi_theta_t) for one prompt (theorem 3.2).

    L - factor K TV(pi_theta, alpha) - factor TV(pi_theta_t, alpha), with L = (J(pi_theta) - J(alpha)) / sigma.

    Args:
        mu: mean reward of the group under alpha.
        tv_theta: TV(pi_theta, alpha); tv_current: TV(pi_theta_t, alpha), which is 0 for X2.
        factor: 2 as printed; 1 also holds for rewards in [0, 1].
    """
    sigma = smoothed_std(mu, eps)
    gain = (j_theta - j_alpha) / sigma
    return gain - factor * stability_constant(sigma) * tv_theta - factor * tv_current


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergences:
    """How far pi is from alpha, estimated from responses of alpha; nats, and total variation in [0, 1]."""

    tv_tok: float
    """Mean over tokens of |rho - 1| / 2: unbiased for the per-token TV."""
    tv_seq: Floats
    """[R] |e^D - 1| / 2: unbiased for the sequence TV, heavy-tailed."""
    tv_union: float
    """Mean over responses of the summed token TV: never below the sequence TV, in expectation."""
    kl_fwd: Floats
    """[R] sum of (rho - 1 - d) >= 0: unbiased for KL(alpha || pi) of the sequence."""
    kl_rev: Floats
    """[R] sum of (rho d - rho + 1) >= 0: unbiased per token for KL(pi || alpha)."""
    kl_rev_tok: float
    """The same, as a mean over tokens."""
    tv_pinsker: float
    """sqrt(KL / 2): upper bound of the sequence TV."""
    tv_bh: float
    """sqrt(1 - e^-KL), Bretagnolle-Huber: upper bound that never exceeds 1."""
    ess: float
    """Effective sample size of the weights e^D, as a fraction of R."""
    max_ratio: float
    """Largest rho of a token."""


def divergences(logp: NDArray[Any], rollout_logprobs: NDArray[Any], lengths: NDArray[Any]) -> Divergences:
    """Estimate all divergences at once (spec A.10).

    Args:
        logp: [T] log pi(y_t | .); rollout_logprobs: [T] log alpha(y_t | .); lengths: [R] tokens per response, all >= 1.
    Raises: ValueError when the shapes contradict each other.
    """
    if logp.shape != rollout_logprobs.shape or int(np.sum(lengths)) != logp.size:
        raise ValueError(f"{logp.shape} log-probs against {rollout_logprobs.shape}, in {int(np.sum(lengths))} tokens")
    if logp.size == 0 or int(np.min(lengths)) < 1:
        raise ValueError("divergences need at least one response, and a token in each")
    d = np.clip(logp.astype(np.float64) - rollout_logprobs.astype(np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    rho = np.exp(d)
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))

    def per_response(tokens: Floats) -> Floats:
        return np.asarray(np.add.reduceat(tokens, starts), dtype=np.float64)

    tv_token = 0.5 * np.abs(rho - 1)
    kl_fwd, kl_rev_token = per_response(rho - 1 - d), rho * d - rho + 1
    weight = np.exp(np.clip(per_response(d), -MAX_LOG_RATIO, MAX_LOG_RATIO))
    kl = float(kl_fwd.mean())
    return Divergences(
        tv_tok=float(tv_token.mean()),
        tv_seq=0.5 * np.abs(weight - 1),
        tv_union=float(per_response(tv_token).mean()),
        kl_fwd=kl_fwd,
        kl_rev=per_response(kl_rev_token),
        kl_rev_tok=float(kl_rev_token.mean()),
        tv_pinsker=math.sqrt(max(kl, 0.0) / 2),
        tv_bh=math.sqrt(-math.expm1(-max(kl, 0.0))),
        ess=float(weight.sum() ** 2 / (weight.size * (weight**2).sum())),
        max_ratio=float(rho.max()),
    )
