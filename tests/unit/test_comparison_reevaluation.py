"""Re-evaluations by age, and the share that chance gives, by hand."""

from __future__ import annotations

from math import comb
from pathlib import Path

import pytest

from bapo.core.types import Purpose
from studies.compare.gather import gather
from studies.compare.reevaluation import floor_of, second_looks
from tests.support.synthetic_runs import evaluation_row, metrics_row, result, write_run

COIN = tuple(float(comb(8, k)) for k in range(9))
"""Groups of 8 responses that are correct with probability 1/2."""


def test_with_one_pass_rate_the_floor_is_the_binomial_probability() -> None:
    # Two to seven correct of eight coins: all but 1 + 8 + 1 of 256.
    assert floor_of(COIN, 1) == pytest.approx(246 / 256, abs=0.01)


def test_hopeless_prompts_lower_the_floor() -> None:
    # Of the failures (k = 0 or 1 of 8), 9 are coins and 247 are prompts that are never solved.
    counts = (COIN[0] + 247, *COIN[1:])
    assert floor_of(counts, 1) == pytest.approx(9 / 256 * 246 / 256, abs=0.01)
    # A second failure leaves 9 * 9 / 256 of the coins.
    assert floor_of(counts, 1, num_failures=2) == pytest.approx(0.316 / 247.316 * 246 / 256, abs=0.003)


def test_each_re_evaluation_is_counted_at_the_age_of_the_last_failure(tmp_path: Path) -> None:
    again = Purpose.REEVALUATE
    groups = {
        1: [result("a", "0000", step=1, version=1), result("b", "0000", step=1, version=1)],
        2: [
            result("a", "0000", step=2, version=2, purpose=again),
            result("c", "0011", step=2, version=2),
            result("c", "0011", step=2, version=2, purpose=again),  # it had not failed
        ],
        3: [
            result("a", "0110", step=3, version=3, purpose=again),
            result("b", "1111", step=3, version=3, purpose=again),  # solved is not improved
        ],
    }
    path = tmp_path / "bapo-s1"
    write_run(
        path, seed=1, metrics=[metrics_row(step) for step in groups], groups=groups,
        evaluations=[evaluation_row("cd4", 1, {"p": "00", "q": "00"})],
    )  # fmt: skip
    found = second_looks(gather([path]).reference.runs)
    assert [(looks.youngest, looks.oldest, looks.num, looks.improved.mean) for looks in found] == [
        (1, 1, 2, 0.5),
        (2, 4, 1, 0.0),
    ]
