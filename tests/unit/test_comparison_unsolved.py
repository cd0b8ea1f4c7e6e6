"""Held-out prompts that the base model fails, and their floor: one population for all methods, counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from studies.compare.gather import Compared, Measured, gather
from studies.compare.prompts import above_floor, floor, rescued, rescued_more, unsolved
from tests.support.synthetic_runs import evaluation_row, write_run

if TYPE_CHECKING:
    pass

# Base of seed 1: p and s at 0/4; of seed 2: p and q. So p counts 1, q and s 1/2, r nothing: 2 of 4 prompts.
BASE = {
    1: {"p": "0000", "q": "1000", "r": "1100", "s": "0000"},
    2: {"p": "0000", "q": "0000", "r": "1110", "s": "0100"},
}
PLAIN = {"p": "0000", "q": "0000", "r": "1100", "s": "0000"}
OURS = {"p": "1000", "q": "1100", "r": "1110", "s": "0000"}


def make_pair(root: Path, *, ours_model: str = "") -> Compared:
    other = ["--model.path", ours_model] if ours_model else []
    for seed in (1, 2):
        for name, final, overrides in (("plain", PLAIN, []), ("ours", OURS, other)):
            rows = [evaluation_row("cd4", 1, BASE[seed]), evaluation_row("cd4", 3, final)]
            write_run(root / f"{name}-s{seed}", seed=seed, evaluations=rows, overrides=overrides)
    return gather([root / f"{name}-s{seed}" for name in ("plain", "ours") for seed in (1, 2)])


def runs_of(compared: Compared) -> list[Measured]:
    return [run for method in compared.methods for run in method.runs]


def test_a_prompt_counts_with_the_share_of_base_measurements_that_left_it_unsolved(tmp_path: Path) -> None:
    found = unsolved(runs_of(make_pair(tmp_path)), "cd4")
    assert found is not None
    assert (found.weights, found.size) == ({"p": 1.0, "q": 0.5, "r": 0.0, "s": 0.5}, 2.0)
    assert found.twice == {"p": 1.0, "q": 0.0, "r": 0.0, "s": 0.0}


def test_measurements_of_one_seed_are_one_sample(tmp_path: Path) -> None:
    # Seed 1 was measured twice, 0/4 and 1/4; seed 2 once, 0/4: (1/2 + 1) / 2, and both unsolved with chance 1/2 x 1.
    for name, seed, marks in (("a-s1", 1, "0000"), ("b-s1", 1, "1000"), ("a-s2", 2, "0000")):
        write_run(tmp_path / name, seed=seed, evaluations=[evaluation_row("cd4", 1, {"p": marks})])
    found = unsolved(runs_of(gather([tmp_path / name for name in ("a-s1", "b-s1", "a-s2")])), "cd4")
    assert found is not None
    assert (found.weights, found.twice) == ({"p": 0.75}, {"p": 0.5})


def test_the_floor_is_what_a_base_measurement_of_another_seed_solves(tmp_path: Path) -> None:
    population = unsolved(runs_of(make_pair(tmp_path)), "cd4")
    assert population is not None
    found = floor(population)
    assert found is not None
    assert found.mean == pytest.approx(0.5)  # q and s of p, q and s: (1/2 + 1/2) of 2
    # Made linear: -1/2, 1, 1/2, 1; sample variance 1/2, so half width t(3) sqrt(1/8).
    assert found.high - found.mean == pytest.approx(3.182446 * 0.125**0.5, rel=1e-5)


def test_methods_are_counted_on_the_same_prompts_above_the_floor_and_in_pairs(tmp_path: Path) -> None:
    compared = make_pair(tmp_path)
    plain, ours = compared.methods
    population = unsolved(runs_of(compared), "cd4")
    assert population is not None
    shares = [rescued(method, "cd4", population) for method in (plain, ours)]
    assert [share and share.mean for share in shares] == [0.0, pytest.approx(0.75)]  # p and q: 1 + 1/2 of 2
    above = [above_floor(method, "cd4", population) for method in (plain, ours)]
    assert [one and one.mean for one in above] == [pytest.approx(-0.5), pytest.approx(0.25)]
    found = rescued_more(ours, plain, "cd4", population)
    assert found is not None
    assert found.mean == pytest.approx(0.75)
    # Made linear: 5/4, 1, 3/4, 0 in both seeds; mean square of prompts 2 x .875 / 3, over 8.
    assert found.high - found.mean == pytest.approx(3.182446 * (2 * 0.875 / 3 / 8) ** 0.5, rel=1e-5)


def test_partial_credit_leaves_a_prompt_unsolved_and_does_not_solve_it(tmp_path: Path) -> None:
    base = {"p": [0.1] * 4, "q": [0.0, 0.1, 0.1, 1.0], "r": [0.0] * 4}
    final = {"p": [0.9] * 4, "q": [1.0] * 4, "r": [0.1, 0.1, 0.1, 1.0]}
    for seed in (1, 2):
        rows = [
            evaluation_row("cd4", version, dict.fromkeys("pqr", "0000"), rewards=rewards)
            for version, rewards in ((1, base), (3, final))
        ]
        write_run(tmp_path / f"ours-s{seed}", seed=seed, evaluations=rows)
    (method,) = gather([tmp_path / "ours-s1", tmp_path / "ours-s2"]).methods
    found = unsolved(method.runs, "cd4")
    assert found is not None
    assert found.weights == {"p": 1.0, "q": 0.0, "r": 1.0}
    share = rescued(method, "cd4", found)
    assert share is not None
    assert share.mean == pytest.approx(1 / 2)  # r alone has a correct response after training
