"""Derived figures of the published tables (bapo/analysis/compare/published.toml), computed by hand."""

from __future__ import annotations

import pytest

from bapo.analysis.compare.tables import published
from tests.support.vectors import vector

GAINS = vector("V21.gains_rel_pct")

SECTIONS = {"math": "math", "plan15": "planning", "plan7": "planning_7b", "vis3": "vision", "vis7": "vision_7b"}


def number(section: str, method: str, what: str = "accuracy") -> float:
    return float(published()[section][method][what])


def gain(section: str, method: str = "bapo", over: str = "grpo") -> float:
    """Relative, in percent."""
    return 100 * (number(section, method) / number(section, over) - 1)


def test_no_mean_of_the_gains_is_the_papers_twelve_and_a_half_percent() -> None:
    gains = [gain(section) for section in SECTIONS.values()]
    small = [gains[0], gains[1], gains[3]]
    assert sum(small) / 3 == pytest.approx(GAINS["mean3"], abs=1e-5)
    assert sum(gains) / 5 == pytest.approx(GAINS["mean5"], abs=1e-5)
    points = [number(section, "bapo") - number(section, "grpo") for section in SECTIONS.values()]
    assert sum(points) / 5 == pytest.approx(GAINS["mean_abs5"], abs=1e-9)
    assert abs(GAINS["mean3"] - 12.5) > 0.5 < abs(GAINS["mean5"] - 12.5)


@pytest.mark.parametrize(
    ("key", "method", "over"),
    [("dapo_over_bapo", "dapo", "bapo"), ("dapo_over_grpo", "dapo", "grpo"), ("bapo_over_grpo", "bapo", "grpo")],
)
def test_ratios_of_rollouts(key: str, method: str, over: str) -> None:
    found = number("math", method, "rollouts") / number("math", over, "rollouts")
    assert found == pytest.approx(GAINS[key], abs=1e-6)
