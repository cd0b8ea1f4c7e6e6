"""Theorem 3.2: constants (V8), the bound, and divergence estimators (V12)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo.algorithms.theory import (
    divergences,
    improvement_bound,
    k1,
    k2,
    k2_on_grid,
    k3,
    smoothed_std,
    stability_constant,
)


@pytest.mark.parametrize(
    ("eps", "k1_8", "k1_16", "k2_eighth", "k3_low", "k3_mid", "k3_high", "k_half"),
    [
        (0.0, 2.023716, 3.131182, 2.023716, 2.023716, 1.157440, 1.065591, 1.0),
        (1e-6, 2.023702, 3.131147, 2.023702, 2.023702, 1.157435, 1.065587, 0.999996),
        (1e-4, 2.022334, 3.127661, 2.022334, 2.022334, 1.156938, 1.065151, 0.999600),
    ],
)
def test_constants_of_the_theorem_are_those_of_the_vectors(
    eps: float, k1_8: float, k1_16: float, k2_eighth: float, k3_low: float, k3_mid: float, k3_high: float, k_half: float
) -> None:
    found = [
        k1(8, eps),
        k1(16, eps),
        k2(1 / 8, eps),
        k3(0.125, 0.25, eps),
        k3(0.3125, 0.4375, eps),
        k3(0.5, 0.625, eps),
        k3(0.5, 0.5, eps),
    ]
    assert found == pytest.approx([k1_8, k1_16, k2_eighth, k3_low, k3_mid, k3_high, k_half], abs=1e-6)


def test_constants_are_not_smoothed_unless_asked_for() -> None:
    assert [k1(8), k2(1 / 8), k3(0.125, 0.25)] == pytest.approx([2.023716] * 3, abs=1e-6)


def test_the_printed_k2_is_too_small_for_c1_above_one_in_g() -> None:
    assert k2(1 / 4) == pytest.approx(1.309401, abs=1e-6)
    assert k2_on_grid(1 / 4, 8) == pytest.approx(2.023716, abs=1e-6)
    assert k2_on_grid(1 / 8, 8) == pytest.approx(k2(1 / 8), abs=1e-12)


def test_no_level_above_c1_is_an_error() -> None:
    with pytest.raises(ValueError, match="no level of G=8"):
        k2_on_grid(7 / 8, 8)


def test_the_bound_is_that_of_the_vectors() -> None:
    numbers = {"j_theta": 0.30, "j_alpha": 0.25, "mu": 0.25, "tv_theta": 0.06, "tv_current": 0.02, "eps": 1e-6}
    assert smoothed_std(0.25, 1e-6) == pytest.approx(0.433014, abs=1e-6)
    assert improvement_bound(**numbers) == pytest.approx(-0.081658, abs=1e-6)
    tight = improvement_bound(**numbers, factor=1.0)
    assert tight == pytest.approx(0.016906, abs=1e-6)
    assert tight <= 0.30 - 0.26  # J(pi_theta) - J(pi_theta_t), which it bounds


# V12: two responses of 3 and 2 tokens, sampled from alpha.
ALPHA = np.array([-1.0, -0.5, -2.0, -0.7, -1.2])
POLICY = np.array([-0.9, -0.6, -1.7, -0.8, -1.1])
LENGTHS = np.array([3, 2])


def test_divergences_are_those_of_the_vectors() -> None:
    found = divergences(POLICY, ALPHA, LENGTHS)
    assert found.tv_tok == pytest.approx(0.075053, abs=1e-6)
    assert found.tv_seq == pytest.approx([0.174929, 0.0], abs=1e-6)
    assert found.tv_seq.mean() == pytest.approx(0.087465, abs=1e-6)
    assert found.kl_fwd == pytest.approx([0.059867, 0.010008], abs=1e-6)
    assert found.kl_rev == pytest.approx([0.065124, 0.010025], abs=1e-6)
    assert found.kl_rev_tok == pytest.approx((0.065124 + 0.010025) / 5, abs=1e-6)
    assert found.tv_pinsker == pytest.approx(0.132170, abs=1e-6)
    assert found.tv_bh == pytest.approx(0.185296, abs=1e-6)
    assert found.tv_union == pytest.approx(0.187631, abs=1e-6)
    assert found.ess == pytest.approx(0.978314, abs=1e-6)
    assert found.max_ratio == pytest.approx(1.349859, abs=1e-6)


def test_estimators_are_unbiased_on_a_distribution_that_can_be_enumerated() -> None:
    # alpha = (.5, .3, .2) as 10 one-token responses, so that the mean over responses is the expectation under alpha.
    alpha = np.log([0.5] * 5 + [0.3] * 3 + [0.2] * 2)
    policy = np.log([0.4] * 5 + [0.4] * 3 + [0.2] * 2)
    found = divergences(policy, alpha, np.ones(10, dtype=int))
    assert found.tv_tok == pytest.approx(0.1, abs=1e-12)
    assert found.kl_fwd.mean() == pytest.approx(0.025267, abs=1e-6)
    assert found.kl_rev_tok == pytest.approx(0.025815, abs=1e-6)


@given(
    logs=st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0)), min_size=1, max_size=12),
    data=st.data(),
)
def test_divergences_have_their_sign_and_their_order(logs: list[tuple[float, float]], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(logs)))
    lengths = np.array([cut] if cut == len(logs) else [cut, len(logs) - cut])
    policy, alpha = (np.array(column) for column in zip(*logs, strict=True))
    found = divergences(policy, alpha, lengths)
    assert (found.kl_fwd >= -1e-12).all()
    assert (found.kl_rev >= -1e-9 * max(1.0, found.max_ratio)).all()
    assert 0 <= found.tv_bh <= 1
    assert found.tv_bh <= math.sqrt(2) * found.tv_pinsker + 1e-9  # 1 - e^-x <= x
    assert 1 / len(lengths) - 1e-9 <= found.ess <= 1 + 1e-9


def test_the_same_policy_has_no_divergence() -> None:
    found = divergences(ALPHA, ALPHA, LENGTHS)
    assert (found.tv_tok, found.tv_union, found.tv_bh, found.kl_rev_tok, found.ess) == (0.0, 0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("lengths", [[3, 1], [5, 0], []])
def test_lengths_that_do_not_cut_the_tokens_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"tokens|token in each"):
        divergences(POLICY, ALPHA, np.array(lengths, dtype=int))


def test_one_impossible_token_cannot_make_the_estimate_infinite() -> None:
    found = divergences(np.array([0.0]), np.array([-1000.0]), np.array([1]))
    assert found.max_ratio == pytest.approx(math.exp(20))
    assert math.isfinite(found.kl_fwd[0])


def test_the_constant_is_least_at_one_half() -> None:
    constants = [stability_constant(smoothed_std(k / 16, 0.0)) for k in range(1, 16)]
    assert min(constants) == constants[7] == 1.0
    assert constants[:8] == sorted(constants[:8], reverse=True)
    assert constants[7:] == sorted(constants[7:])
