"""The report's section about the theorem meter: its numbers by hand, and the words that it must say."""

from __future__ import annotations

import re
from typing import Any

import pytest

from bapo.report import theorem
from bapo.report.theorem_section import theorem_meter
from tests.unit.test_launcher_display import make_row

NUMBERS = ("tv_tok", "tv_tok_p95", "tv_seq", "delta_max", "kl_fwd", "ess", "max_ratio")
CONFIG = {"diagnostics": {"tv_warn": 0.05, "ess_warn": 0.5}}


def make_cell(origin: str, age: int | None, **numbers: float) -> dict[str, Any]:
    cell = {"policy": "theta_t", "origin": origin, "age": age, "num_groups": 4, "num_responses": 32, "num_tokens": 320}
    return cell | dict.fromkeys(NUMBERS, 0.5) | numbers


def make_bound(origin: str, *, paper: float, tight: float, tight_vacuous: bool) -> dict[str, Any]:
    parts = {"k": 1.5, "gain": 0.25, "penalty_theta": 0.125, "penalty_current": 0.0625}
    forms = {"paper": paper, "paper_vacuous": True, "tight": tight, "tight_vacuous": tight_vacuous}
    return {"origin": origin, **parts, **forms}


ROWS = [
    make_row(1),  # a step without a measurement
    make_row(
        2, k1=2.02, k2=2.0, k2_on_grid=2.1, k3=1.5, warning="x3 of age 2: <far>",
        divergences=[
            make_cell("x1", None, tv_tok=0.02, tv_tok_p95=0.06, ess=0.9), make_cell("x1", 2, tv_tok=0.04),
            make_cell("x1", None, tv_tok=9.0) | {"policy": "theta"},
        ],
        bounds=[make_bound("x1", paper=-0.4, tight=-0.2, tight_vacuous=True)],
    ),
    make_row(
        3, k1=2.02, k2=2.0, k2_on_grid=2.1, k3=1.1, warning=None,
        divergences=[
            make_cell("x1", None, tv_tok=0.04, tv_tok_p95=0.03, ess=0.7), make_cell("x3", None, tv_tok=0.01),
            make_cell("x3", 1),
        ],
        bounds=[make_bound("x1", paper=-0.2, tight=0.1, tight_vacuous=False)],
    ),
]  # fmt: skip


def test_summaries_are_over_the_steps_that_had_the_cell() -> None:
    summaries = theorem.cell_summaries(ROWS)
    assert [(cell.origin, cell.age, cell.num_steps) for cell in summaries] == [
        ("x1", None, 2), ("x1", 2, 1), ("x3", None, 1), ("x3", 1, 1),
    ]  # fmt: skip
    first = summaries[0]
    assert first.means["tv_tok"] == pytest.approx(0.03)
    assert (first.most["delta_max"], first.least_ess, first.groups) == (0.5, 0.7, 4.0)
    assert [cell.means["tv_tok"] for cell in theorem.cell_summaries(ROWS, policy="theta")] == [9.0]


def test_a_curve_is_one_subset_and_its_band_never_ends_below_it() -> None:
    x1, x3 = theorem.curves(ROWS, "tv_tok", spread="tv_tok_p95")
    assert (x1.name, x1.steps, x1.values, x1.high) == ("x1", [2, 3], [0.02, 0.04], [0.06, 0.04])
    assert (x3.name, x3.steps) == ("x3", [3])


def test_bounds_are_vacuous_in_so_many_steps() -> None:
    (bound,) = theorem.bound_summaries(ROWS)
    assert (bound.origin, bound.num_steps, bound.means["gain"]) == ("x1", 2, 0.25)
    assert (bound.means["paper"], bound.means["tight"]) == pytest.approx((-0.3, -0.05))
    assert (bound.words("paper"), bound.words("tight")) == ("vacuous in every step", "vacuous in 1 of 2 steps")


def test_constants_are_a_range_and_none_is_not_in_it() -> None:
    assert theorem.constants(ROWS)["k3"] == (1.1, 1.5)
    assert theorem.constants([make_row(1, k3=None)]) == {}


def test_the_section_says_vacuous_and_names_the_warning() -> None:
    text = re.sub(r"<[^>]+>", " ", "\n".join(theorem_meter(ROWS, CONFIG)))
    assert "Theorem meter" in text
    assert "-0.3000, vacuous in every step" in text
    assert "0.1250  0.0625" in text, "the two penalties"
    assert "x3 of age 2: &lt;far&gt;" in text
    assert "1 of 3 steps went beyond a limit" in text
    assert "limit 0.05" in text


def test_a_run_without_measurements_has_no_section() -> None:
    assert list(theorem_meter([make_row(1)], CONFIG)) == []


def test_a_quiet_run_says_that_nothing_was_wrong() -> None:
    text = "\n".join(theorem_meter(ROWS[2:], CONFIG))
    assert "No step went beyond diagnostics.tv_warn" in text


def test_without_bounds_the_section_says_why() -> None:
    text = "\n".join(theorem_meter([ROWS[1] | {"bounds": []}], CONFIG))
    assert "No step had a bound" in text
