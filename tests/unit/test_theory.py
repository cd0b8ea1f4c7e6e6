"""Theorem 3.2: constants and the bound (V8), for one prompt and for the prompts of a subset."""

from __future__ import annotations

import math

import numpy as np
import pytest

from learner.advantages.formulas import group_advantages
from learner.diagnostics.theory import (
    Estimate,
    k1,
    k2,
    k2_on_grid,
    k3,
    reweighted_rewards,
    smoothed_std,
    stability_constant,
    subset_bound,
)
from tests.support.vectors import vector


@pytest.mark.parametrize(("eps", "name"), [(0.0, "eps=0"), (1e-6, "eps=1e-06"), (1e-4, "eps=0.0001")])
def test_constants_of_the_theorem_are_those_of_the_vectors(eps: float, name: str) -> None:
    want = vector("V8.K")[name]
    assert k1(8, eps) == pytest.approx(want["K1_G8"], abs=1e-6)
    assert k1(16, eps) == pytest.approx(want["K1_G16"], abs=1e-6)
    assert k2(1 / 8, eps) == pytest.approx(want["K2_c1_1/8"], abs=1e-6)
    assert k3(0.125, 0.25, eps) == pytest.approx(want["K3_r0_[.125,.25]"], abs=1e-6)
    assert k3(0.3125, 0.4375, eps) == pytest.approx(want["K3_r.5_[.3125,.4375]"], abs=1e-6)
    assert k3(0.5, 0.625, eps) == pytest.approx(want["K3_r1_[.5,.625]"], abs=1e-6)
    assert k3(0.5, 0.5, eps) == pytest.approx(want["K_mini_0.5"], abs=1e-6)


def test_constants_are_not_smoothed_unless_asked_for() -> None:
    assert [k1(8), k2(1 / 8), k3(0.125, 0.25)] == pytest.approx([2.023716] * 3, abs=1e-6)


def test_the_printed_k2_is_too_small_for_c1_above_one_in_g() -> None:
    want = vector("V8.K2_grid")
    assert k2(1 / 4) == pytest.approx(want["c1_1_4_paper"], abs=1e-6)
    assert k2_on_grid(1 / 4, 8) == pytest.approx(want["c1_1_4_grid"], abs=1e-6)
    assert k2_on_grid(1 / 8, 8) == pytest.approx(want["c1_1_8"], abs=1e-6)
    assert k2_on_grid(1 / 8, 8) == pytest.approx(k2(1 / 8), abs=1e-12)


def test_the_reweighted_advantage_is_the_gain_of_the_bound() -> None:
    """Eqs. 25, 26: E_alpha[W A] = (J(pi_theta) - J(alpha)) / sigma; four responses are alpha's exact expectation."""
    want = vector("V8.bound")
    weight = np.array([0.30 / 0.25, *[0.70 / 0.75] * 3])
    gain = float(np.mean(weight * group_advantages([1, 0, 0, 0], "pop_var", 1e-6)))
    assert gain == pytest.approx(want["L"], abs=1e-6)
    assert gain - (0.30 - 0.25) / smoothed_std(0.25, 1e-6) == pytest.approx(want["identity_gap"], abs=1e-12)


def test_the_constant_is_least_at_one_half() -> None:
    constants = [stability_constant(smoothed_std(k / 16, 0.0)) for k in range(1, 16)]
    assert min(constants) == constants[7] == 1.0
    assert constants[:8] == sorted(constants[:8], reverse=True)
    assert constants[7:] == sorted(constants[7:])


def test_of_one_prompt_the_subset_bound_is_the_bound_of_the_vectors_in_both_forms() -> None:
    bound = subset_bound(
        j_theta=np.array([0.30]),
        mu=np.array([0.25]),
        sigma=np.array([0.4330139]),
        tv_theta=np.array([0.06]),
        tv_current=np.array([0.02]),
    )
    want = vector("V8.bound")
    assert smoothed_std(0.25, 1e-6) == pytest.approx(want["sigma"], abs=1e-6)
    assert want["J_theta"] - want["J_t"] == pytest.approx(want["lhs"])
    assert bound.tight.mean <= want["lhs"], "J(pi_theta) - J(pi_theta_t), which it bounds"
    assert bound.paper.mean == pytest.approx(want["rhs_paper"], abs=1e-6)
    assert bound.tight.mean == pytest.approx(want["rhs_tight_factor1"], abs=1e-6)
    assert bound.gain == pytest.approx(want["L"], abs=1e-6)
    assert bound.k == pytest.approx(want["K_x"], abs=1e-6)
    assert bound.k == pytest.approx(1.309395, abs=1e-6)
    assert (bound.paper.stderr, bound.tight.is_vacuous) == (None, True), "one prompt says nothing of its noise"


def test_the_subset_bound_is_a_mean_over_prompts_with_its_noise() -> None:
    # sigma 1/2: K = 1. Prompt 1: gain (.7 - .5) / .5 = .4, TV .1 and .05. Prompt 2: gain 0, TV .2 and 0.
    bound = subset_bound(
        j_theta=np.array([0.7, 0.5]),
        mu=np.array([0.5, 0.5]),
        sigma=np.array([0.5, 0.5]),
        tv_theta=np.array([0.1, 0.2]),
        tv_current=np.array([0.05, 0.0]),
    )
    assert (bound.k, bound.gain, bound.penalty_theta, bound.penalty_current) == pytest.approx((1, 0.2, 0.15, 0.025))
    assert bound.tight.mean == pytest.approx((0.25 - 0.2) / 2)
    assert bound.paper.mean == pytest.approx((0.1 - 0.4) / 2)
    assert bound.tight.stderr == pytest.approx(0.225)  # 0.25 and -0.2 lie 0.225 around their mean
    assert bound.paper.stderr == pytest.approx(0.25)


def test_rewards_are_reweighted_within_their_group() -> None:
    # Group 0: weights 1 and 3, the heavier one right: 3/4. Group 2: 2 of 2 wrong. Group 1 has no response.
    found = reweighted_rewards(np.log([1.0, 3.0, 2.0, 2.0]), np.array([0.0, 1.0, 0.0, 0.0]), np.array([0, 0, 2, 2]), 3)
    assert found[[0, 2]].tolist() == pytest.approx([0.75, 0.0])
    assert math.isnan(found[1])


def test_reweighted_rewards_of_long_responses_depend_on_the_ratio_of_their_weights() -> None:
    # e^-30 and e^-25: e^-5 / (e^-5 + 1) = .0066929. Group 1 has e^1000 and e^1001: 1 / (1 + e) = .2689414.
    log_weight = np.array([-30.0, -25.0, 1000.0, 1001.0])
    found = reweighted_rewards(log_weight, np.array([1.0, 0.0, 1.0, 0.0]), np.array([0, 0, 1, 1]), 2)
    assert found.tolist() == pytest.approx([0.0066929, 0.2689414], abs=1e-7)


def test_no_level_above_c1_is_an_error() -> None:
    with pytest.raises(ValueError):
        k2_on_grid(7 / 8, 8)


@pytest.mark.parametrize(
    ("mean", "stderr", "vacuous"),
    [(-0.1, 0.01, True), (0.0, 0.0, True), (0.1, 0.06, True), (0.1, 0.04, False), (0.1, None, True)],
)
def test_a_bound_promises_something_only_above_zero_and_above_its_noise(
    mean: float, stderr: float | None, vacuous: bool
) -> None:
    assert Estimate(mean=mean, stderr=stderr).is_vacuous is vacuous
