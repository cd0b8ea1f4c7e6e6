"""Theorem 3.2: the constants K_i, and the bound for one prompt and for the prompts of a subset X_i.

Two defects of the paper that are not copied (docs/paper.md): for rewards in [0, 1] every "2 TV" of the theorem may be
a "TV", so the bound is given as printed and `tight`; and eq. 12 with c1(1 - c1) is too small for c1 > 1/G, because mu
may also be (G-1)/G: `k2_on_grid` is the constant that holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

PAPER, TIGHT = 2.0, 1.0
"""Factor of every TV in the theorem: as printed, and as it may be for rewards in [0, 1]."""
Z95 = 1.959964
"""97.5 % quantile of the normal distribution."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A lower bound of an improvement, as a mean over prompts."""

    mean: float
    stderr: float | None
    """None for a single prompt."""

    @property
    def is_vacuous(self) -> bool:
        """Whether it promises no improvement: it is not above 0 by more than its own noise."""
        return self.stderr is None or self.mean - Z95 * self.stderr <= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """An estimate of the right-hand side of the theorem for one subset X_i: a mean over its prompts."""

    num_groups: int
    k: float
    """Mean of K_x = (1 - sigma_x) / sigma_x; the theorem's K_i is the largest that is possible."""
    gain: float
    """L: mean of (J(pi_theta) - mu) / sigma."""
    penalty_theta: float
    """Mean of K_x TV(pi_theta, alpha), without the factor."""
    penalty_current: float
    """Mean of TV(pi_theta_t, alpha), without the factor."""
    paper: Estimate
    """gain - 2 (penalty_theta + penalty_current)."""
    tight: Estimate
    """gain - penalty_theta - penalty_current."""


def subset_bound(*, j_theta: Floats, mu: Floats, sigma: Floats, tv_theta: Floats, tv_current: Floats) -> Bound:
    """Lower bound of J(pi_theta) - J(pi_theta_t) (theorem 3.2), as a mean over the prompts of one subset.

    L - factor K TV(pi_theta, alpha) - factor TV(pi_theta_t, alpha), with L = (J(pi_theta) - J(alpha)) / sigma.

    Args:
        j_theta, mu, sigma, tv_theta, tv_current: [P], P >= 1.
        mu: mean reward of each group under alpha.
        sigma: smoothed standard deviation of each group's rewards, > 0.
        tv_current: 0 where alpha is pi_theta_t (X2).
    """
    k = (1 - sigma) / sigma
    gain, theta = (j_theta - mu) / sigma, k * tv_theta
    return Bound(
        num_groups=len(mu),
        k=float(k.mean()),
        gain=float(gain.mean()),
        penalty_theta=float(theta.mean()),
        penalty_current=float(tv_current.mean()),
        paper=_estimate(gain - PAPER * (theta + tv_current)),
        tight=_estimate(gain - TIGHT * (theta + tv_current)),
    )


def reweighted_rewards(log_weight: Floats, rewards: Floats, groups: NDArray[np.int64], num_groups: int) -> Floats:
    """[P] J(pi_theta | x) from responses of alpha: sum_j W_j r_j / sum_j W_j over each group; NaN without a response.

    Args:
        log_weight: [R] log W_j; rewards: [R]; groups: [R] which of the P = `num_groups` groups a response belongs to.
    """
    largest = np.full(num_groups, -np.inf)
    np.maximum.at(largest, groups, log_weight)
    weight = np.exp(log_weight - largest[groups])  # a factor that a group has in common changes nothing
    total = np.bincount(groups, weight, minlength=num_groups)
    rewarded = np.bincount(groups, weight * rewards, minlength=num_groups)
    found: Floats = np.full(num_groups, np.nan)
    np.divide(rewarded, total, out=found, where=total > 0)
    return found


def _estimate(values: Floats) -> Estimate:
    stderr = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return Estimate(mean=float(values.mean()), stderr=stderr)
