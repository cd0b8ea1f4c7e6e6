"""Intervals of held-out accuracy and over seeds: against printed tables and sums by hand."""

from __future__ import annotations

import math

import pytest

from bapo.core.statistics import difference, estimate, shared_means
from studies.significance import (
    crossed,
    holm,
    student_quantile,
    weighted,
)


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [  # Wilson score intervals without continuity correction
        (1, 10, 0.0179, 0.4042),
        (5, 10, 0.2366, 0.7634),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_one_response_per_prompt_gives_the_wilson_interval(right: int, total: int, low: float, high: float) -> None:
    found = estimate([1.0] * right + [0.0] * (total - right))
    assert found.mean == right / total
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_independent_responses_narrow_the_interval() -> None:
    """Prompt means of .5 +- .25: variance .0625, so 8 prompts count as 8 * .25 / .0625 = 32 responses."""
    found = estimate([0.25, 0.75] * 4)
    want = estimate([1.0, 0.0] * 16)
    assert (found.low, found.high) == (pytest.approx(want.low), pytest.approx(want.high))


def test_the_change_is_paired_by_prompt() -> None:
    """Changes .5, .5, 0, 0: mean .25, variance 1/12, standard error sqrt(1/48)."""
    found = difference([0.0, 0.5, 0.5, 1.0], [0.5, 1.0, 0.5, 1.0])
    half = 1.959964 / math.sqrt(48)
    assert found.mean == 0.25
    assert (found.low, found.high) == (pytest.approx(0.25 - half), pytest.approx(0.25 + half))


def test_a_change_needs_the_same_prompts_twice() -> None:
    with pytest.raises(ValueError):
        difference([0.0, 1.0], [0.0, 1.0, 1.0])


def test_only_prompts_that_every_measurement_has_are_compared() -> None:
    first = {"p": [1.0, 0.0], "q": [1.0, 1.0], "r": [0.0, 0.0]}
    second = {"q": [0.0], "s": [1.0], "p": [1.0]}
    assert shared_means([first, second]) == [[0.5, 1.0], [1.0, 0.0]]
    assert shared_means([{"p": [1.0]}, {"s": [1.0]}]) == [[], []]


def test_prompts_that_are_all_alike_still_have_a_width() -> None:
    found = estimate([0.5] * 10)
    assert (round(found.low, 4), round(found.high, 4)) == (0.2366, 0.7634)


def test_no_prompts_have_no_accuracy() -> None:
    with pytest.raises(ValueError):
        estimate([])


# -- over seeds and prompts


@pytest.mark.parametrize(
    ("freedom", "want"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980), (100_000, 1.960)],
)
def test_student_quantiles_are_those_of_printed_tables(freedom: int, want: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(want, abs=5e-4)


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


def test_what_seeds_and_prompts_leave_over_is_taken_off_once_and_has_its_own_degrees_of_freedom() -> None:
    # Mean 0; seeds -2, 0, 2; prompts -3, -1, 1, 3; and 3 in four cells that add up to 0 in each row and column.
    #   MS_seed = 4 x 8 / 2 = 16;  MS_prompt = 3 x 20 / 3 = 20;  MS_rest = 36 / 6 = 6
    #   Var = (16 + 20 - 6) / 12 = 5/2;  freedom = 30^2 / (16^2 / 2 + 20^2 / 3 + 6^2 / 6) = 3.36658, t = 2.99511
    table = [[-2, -6, -1, 1], [-6, 2, 1, 3], [-1, 1, 3, 5]]
    found = crossed(table)
    assert found.mean == 0
    assert found.high == pytest.approx(2.99511 * math.sqrt(5 / 2), rel=1e-5)


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
    with pytest.raises(ValueError):
        weighted([[0.0, 0.0]], [0.0, 0.0])


def test_the_p_value_is_that_of_students_t() -> None:
    # Seeds differ and prompts do not: t = 1/4 / sqrt(1/32) with 2 degrees of freedom, p = 1 - t / sqrt(2 + t^2).
    found = crossed([[0.0, 0.25], [0.25, 0.5]])
    t = 0.25 / math.sqrt(1 / 32)
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert crossed([[0.0, 0.0]]).p == 1.0


def test_holm_multiplies_by_the_hypotheses_that_are_left() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
