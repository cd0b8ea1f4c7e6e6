"""Intervals over seeds and prompts, and exact tests on pairs: against hand calculations and printed tables."""

from __future__ import annotations

import math

import pytest

from bapo.analysis.significance import (
    binomial_two_sided,
    crossed,
    geometric,
    mcnemar,
    stratified,
    student_cdf,
    student_quantile,
    weighted,
)


@pytest.mark.parametrize(
    ("freedom", "want"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980), (100_000, 1.960)],
)
def test_student_quantiles_are_those_of_printed_tables(freedom: int, want: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(want, abs=5e-4)


def test_student_with_one_and_two_degrees_of_freedom_has_a_closed_form() -> None:
    assert student_cdf(1.0, 1) == pytest.approx(0.5 + math.atan(1.0) / math.pi)
    assert student_cdf(2.0, 2) == pytest.approx(0.5 + 2.0 / (2 * math.sqrt(2 + 4.0)))


def test_mcnemar_by_hand() -> None:
    #        both right, both wrong, one only the first, five only the second
    first = [1, 0, 1, 0, 0, 0, 0, 0]
    second = [1, 0, 0, 1, 1, 1, 1, 1]
    found = mcnemar(first, second)
    assert (found.better, found.worse) == (5, 1)
    assert found.p == pytest.approx(2 * (1 + 6) / 64)  # P(at most 1 or at least 5 of 6)


def test_mcnemar_of_shares_is_a_sign_test() -> None:
    found = mcnemar([0.25, 0.5, 0.5], [0.5, 0.5, 0.25])
    assert (found.better, found.worse, found.p) == (1, 1, 1.0)


def test_strata_add_up_before_they_are_tested() -> None:
    # One seed 3 : 0 (p = 1/4), the other 3 : 1 (p = 5/8); together 6 : 1, p = 2 (1 + 7) / 128.
    strata = [([0, 0, 0], [1, 1, 1]), ([0, 0, 0, 1], [1, 1, 1, 0])]
    assert stratified(strata).p == pytest.approx(0.125)
    assert (stratified(strata).better, stratified(strata).worse) == (6, 1)


def test_pairs_must_be_pairs() -> None:
    with pytest.raises(ValueError, match="the same prompts"):
        mcnemar([1], [1, 0])


def test_with_one_seed_the_interval_is_over_prompts() -> None:
    # Mean 1/2, sample variance 1/3 over 4 prompts: half width t(3) sqrt(1/12).
    found = crossed([[0, 0, 1, 1]])
    assert found.mean == 0.5
    assert found.high - found.mean == pytest.approx(3.182446 * math.sqrt(1 / 12), rel=1e-5)


def test_with_two_seeds_it_is_over_both_by_the_two_way_table() -> None:
    # Seeds .25 and .75; prompts .5, .5, .5, .5 -> no prompt effect.
    #   MS_seed = 4 (2 x .0625) / 1 = .5;  MS_prompt = 0;  rest: deviations all 1/2 -> cells 0/1 against .25/.75
    table = [[1, 0, 0, 0], [0, 1, 1, 1]]
    #   residual of each cell: y - seed - prompt + mean = y - seed; squares: .75^2 + 3 (.25^2), twice -> 1.5, / 3 = .5
    #   Var = max(.5 + 0 - .5, .5, 0) / 8 = .0625; freedom = .5^2 / (.5^2 / 1 + 0 + .5^2 / 3) = .75 -> 1
    found = crossed(table)
    assert found.mean == 0.5
    assert found.high - found.mean == pytest.approx(12.7062 * math.sqrt(0.5 / 8), rel=1e-4)


def test_seeds_that_agree_leave_the_uncertainty_of_the_prompts() -> None:
    one, three = crossed([[0, 0, 1, 1]]), crossed([[0, 0, 1, 1]] * 3)
    # MS_prompt = 3 x 1/3 = 1, nothing else; Var = 1 / 12 as with one seed.
    assert (three.mean, three.high) == (one.mean, pytest.approx(one.high))


def test_no_prompts_and_other_prompts_are_refused() -> None:
    for table in ([], [[]], [[1, 0], [1]], [[1]]):
        with pytest.raises(ValueError):
            crossed(table)


def test_a_weighted_share_is_a_ratio_of_sums_made_linear() -> None:
    # 1 x 1 + 1/2 x 0 of 3/2. Mean weight 3/4: 2/3 + (1 - 2/3) / (3/4) = 10/9 and 2/3 + (0 - 1/3) / (3/4) = 2/9.
    found = weighted([[1.0, 0.0]], [1.0, 0.5])
    assert found.mean == pytest.approx(2 / 3)
    # They are 8/9 apart: sample variance 32/81, over 2 prompts, t with one degree of freedom.
    assert found.high - found.mean == pytest.approx(12.7062 * math.sqrt(16 / 81), rel=1e-5)
    with pytest.raises(ValueError, match="no prompt has a weight"):
        weighted([[0.0, 0.0]], [0.0, 0.0])


@pytest.mark.parametrize(
    ("k", "n", "want"),
    [
        (0, 0, 1.0),
        (1, 1, 1.0),
        (0, 5, 2 / 32),
        (5, 5, 2 / 32),
        (1, 6, 2 * (1 + 6) / 64),
        (2, 10, 2 * (1 + 10 + 45) / 1024),
        (3, 6, 1.0),
    ],
)
def test_the_binomial_test_sums_both_tails(k: int, n: int, want: float) -> None:
    assert binomial_two_sided(k, n) == pytest.approx(want)


def test_equal_weights_change_nothing() -> None:
    table = [[0.0, 0.25, 1.0], [0.5, 0.25, 0.75]]
    plain, found = crossed(table), weighted(table, [1.0, 1.0, 1.0])
    assert (found.mean, found.low, found.high) == pytest.approx((plain.mean, plain.low, plain.high))


def test_ratios_are_averaged_as_logarithms() -> None:
    found = geometric([1.0, 2.0, 4.0])  # logarithms 0, log 2, 2 log 2: standard error log(2) / sqrt(3), t(2) = 4.302653
    assert found.mean == pytest.approx(2.0)
    assert found.high == pytest.approx(2.0 * 2 ** (4.302653 / math.sqrt(3)), rel=1e-5)
    assert found.low == pytest.approx(4.0 / found.high)
    with pytest.raises(ValueError, match="one seed"):
        geometric([2.0])
