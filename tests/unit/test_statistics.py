"""Intervals of held-out accuracy, against published Wilson limits and sums done by hand."""

from __future__ import annotations

import math

import pytest

from bapo.core.statistics import difference, estimate, shared_means


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


def test_copies_of_one_response_are_no_new_evidence() -> None:
    """Two equal responses per prompt have the same prompt means as one."""
    assert estimate([1.0, 0.0, 0.0, 1.0]) == estimate([(1.0 + 1.0) / 2, 0.0, 0.0, 1.0])


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
    with pytest.raises(ValueError, match="got 2 and 3"):
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
    with pytest.raises(ValueError, match="no prompts"):
        estimate([])
