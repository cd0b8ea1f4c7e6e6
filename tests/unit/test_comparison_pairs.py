"""Methods in pairs: which are compared, at equal responses, and responses for equal accuracy; all values by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from bapo.analysis.compare.accuracy import at_equal_responses, first_crossing, means_at, responses_for
from bapo.analysis.compare.gather import Compared, Measured, Method, against, contrasts, gather
from bapo.analysis.compare.tables import table_equal_responses, table_responses_for, table_settings
from bapo.core.errors import ConfigError
from tests.support.synthetic_runs import evaluation_row, fate, metrics_row, write_run

STEPS = 4
NOTHING = {"p": "0000", "q": "0000"}


def make_run(
    path: Path, measured: Mapping[int, Mapping[str, str]], *, groups: int = 1, seed: int = 1, step_s: float = 2.0
) -> Path:
    """Four steps of so many groups of 4 responses, measured after these steps (0: before training)."""
    sampled = {step: [fate(f"t{step}.{i}", "0001", step=step) for i in range(groups)] for step in range(1, STEPS + 1)}
    write_run(
        path, seed=seed, metrics=[metrics_row(step, step_s=step_s) for step in range(1, STEPS + 1)],
        groups=sampled,
        evaluations=[evaluation_row("cd4", step + 1, right) for step, right in measured.items()],
    )  # fmt: skip
    return path


def one_run(path: Path, measured: Mapping[int, Mapping[str, str]], *, groups: int = 1) -> Measured:
    return gather([make_run(path, measured, groups=groups)]).reference.runs[0]


def methods_of(root: Path) -> tuple[Method, ...]:
    return gather(sorted(path.parent for path in root.glob("*/config.toml"))).methods


def make_methods(root: Path, *names: str) -> Compared:
    return gather([make_run(root / f"{name}-s1", {0: NOTHING, 4: NOTHING}) for name in names])


def pairs(compared: Compared) -> list[tuple[str, str]]:
    return [(one.method.name, one.reference.name) for one in contrasts(compared)]


# -- who is compared with whom
def test_methods_are_compared_with_the_first_one_and_bapo_with_dapo(tmp_path: Path) -> None:
    compared = make_methods(tmp_path, "grpo", "dapo", "bapo")
    assert pairs(compared) == [("dapo", "grpo"), ("bapo", "grpo"), ("bapo", "dapo")]


def test_against_makes_any_method_the_reference_of_all_others(tmp_path: Path) -> None:
    compared = against(make_methods(tmp_path, "grpo", "dapo", "bapo"), ["bapo", "grpo", "bapo"])
    assert compared.reference.name == "bapo"
    assert pairs(compared) == [("grpo", "bapo"), ("dapo", "bapo"), ("dapo", "grpo"), ("bapo", "grpo")]
    assert [row[0] for row in table_settings(compared).rows] == ["grpo", "dapo"]


def test_an_unknown_method_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        against(make_methods(tmp_path, "grpo", "bapo-mini"), ["bapo-min"])
    assert str(caught.value) == (
        "--against bapo-min: no such method in these runs (did you mean 'bapo-mini'?); there are grpo, bapo-mini"
    )


# -- one run at a number of responses


def test_behind_the_last_measurement_there_is_no_answer(tmp_path: Path) -> None:
    run = one_run(tmp_path / "one", {0: NOTHING, 2: NOTHING}, groups=2)
    assert means_at(run, "cd4", 32) == "one was last measured after 16 responses, before 32"
    assert means_at(run, "cd4", 8) == {"p": 0.0, "q": 0.0}


# -- two methods at equal responses
def make_unequal(root: Path, *, middle: Mapping[str, str] | None = None) -> tuple[Method, Method]:
    """plain spends 16 responses, ours 32: half of the way. Differences there: seed 1 0, 1/4; seed 2 1/4, 1/2."""
    ends = {1: {"p": "1000", "q": "1000"}, 2: {"p": "1000", "q": "0000"}}
    ours = {1: {"p": "1100", "q": "1111"}, 2: {"p": "1111", "q": "1111"}}
    for seed in (1, 2):
        make_run(root / f"plain-s{seed}", {0: NOTHING, 4: ends[seed]}, seed=seed)
        make_run(root / f"ours-s{seed}", {0: NOTHING, 4: ours[seed]}, groups=2, seed=seed)
    ours_method, plain = methods_of(root)
    return ours_method, plain


def test_at_equal_responses_methods_are_paired_by_seed_and_prompt(tmp_path: Path) -> None:
    ours, plain = make_unequal(tmp_path)
    found = at_equal_responses(ours, plain, "cd4")
    assert not isinstance(found, str)
    assert (found.budget, found.seeds, found.num_prompts) == (16, (1, 2), 2)
    # ours: 1/4, 1/2 and 1/2, 1/2; plain 1/4, 1/4 and 1/4, 0.
    assert (found.method, found.reference) == (7 / 16, 3 / 16)
    # [0, 1/4], [1/4, 1/2] is additive: both mean squares 1/16, none left; Var = 1/32 with 2 degrees of freedom.
    assert found.difference.mean == pytest.approx(0.25)
    assert found.difference.high - found.difference.mean == pytest.approx(4.302653 * math.sqrt(1 / 32), rel=1e-5)
    opposite = at_equal_responses(plain, ours, "cd4")
    assert not isinstance(opposite, str)
    assert opposite.difference.mean == pytest.approx(-0.25)
    rows = table_equal_responses(gather([run.directory.path for m in (plain, ours) for run in m.runs])).rows
    assert rows == (("ours", "plain", "cd4", "+25.0 [-51.1, +101.1]", "16", "2 x 2", "43.8 : 18.8"),)


def test_a_seed_without_an_answer_is_not_left_out_silently(tmp_path: Path) -> None:
    make_run(tmp_path / "plain-s1", {0: NOTHING, 4: NOTHING})
    make_run(tmp_path / "plain-s2", {0: NOTHING, 2: NOTHING}, seed=2)
    for seed in (1, 2):
        make_run(tmp_path / f"ours-s{seed}", {0: NOTHING, 4: NOTHING}, seed=seed)
    ours, plain = methods_of(tmp_path)
    assert at_equal_responses(ours, plain, "cd4") == "plain-s2 was last measured after 8 responses, before 16"
    rows = table_equal_responses(gather([run.directory.path for m in (plain, ours) for run in m.runs])).rows
    assert rows[0][3:] == ("plain-s2 was last measured after 8 responses, before 16", "-", "-", "-")


# -- responses for equal accuracy
@pytest.mark.parametrize(
    ("target", "want"),
    [(0.1, 0), (0.2, 0), (0.3, 5), (0.4, 10), (0.5, 20 + 10 * 2 / 3), (0.6, 30), (0.61, None)],
)
def test_the_first_crossing_is_on_the_way_up(target: float, want: float | None) -> None:
    found = first_crossing([(0, 0.2), (10, 0.4), (20, 0.3), (30, 0.6)], target)
    assert found == (want if want is None else pytest.approx(want))


HALF, QUARTER, EIGHTH = {"p": "1100", "q": "1100"}, {"p": "1000", "q": "1000"}, {"p": "1000", "q": "0000"}


WHOLE = {"p": "1111", "q": "1111"}


def make_curves(root: Path, ours: Mapping[int, Mapping[str, str]], plain: Mapping[int, Mapping[str, str]]) -> Compared:
    """plain spends 16 responses and ours 32, per seed, from these measurements at 0 to those at the end."""
    for seed in ours:
        make_run(root / f"plain-s{seed}", {0: NOTHING, 4: plain[seed]}, seed=seed)
        make_run(root / f"ours-s{seed}", {0: NOTHING, 4: ours[seed]}, groups=2, seed=seed)
    return gather([root / f"{name}-s{seed}" for name in ("plain", "ours") for seed in ours])


def test_the_factor_is_a_geometric_mean_over_seeds_with_their_interval(tmp_path: Path) -> None:
    # Seed 1: 1/2 after 16 responses, which ours has after 16 of 32 on its way to 1. Seed 2: 1/4, which it has at 32.
    compared = make_curves(tmp_path, {1: WHOLE, 2: QUARTER}, {1: HALF, 2: QUARTER})
    plain, ours = compared.methods
    found = responses_for(ours, plain, "cd4")
    assert not isinstance(found, str)
    assert [(one.needed, one.own, one.ratio) for one in found.by_seed] == [(16, 16, 1.0), (32, 16, 2.0)]
    assert found.ratio is not None
    assert found.ratio.mean == pytest.approx(math.sqrt(2))
    # Logarithms 0 and log 2: standard error log(2) / 2, Student's t with one degree of freedom is 12.706.
    assert found.ratio.high == pytest.approx(math.sqrt(2) * 2 ** (12.7062 / 2), rel=1e-4)
    assert found.ratio.low == pytest.approx(math.sqrt(2) / 2 ** (12.7062 / 2), rel=1e-4)
    (row,) = table_responses_for(compared).rows
    assert row == (
        "ours", "plain", "cd4", "x1.41 [x0.017, x116]", "2 of 2", "s1 16 : 16 x1.00, s2 32 : 16 x2.00"
    )  # fmt: skip


def test_a_seed_that_never_reaches_it_leaves_bounds_and_no_mean(tmp_path: Path) -> None:
    compared = make_curves(tmp_path, {1: WHOLE, 2: EIGHTH}, {1: HALF, 2: QUARTER})
    plain, ours = compared.methods
    found = responses_for(ours, plain, "cd4")
    assert not isinstance(found, str)
    assert (found.ratio, found.reached, found.bounds) == (None, 1, (1.0, None))
    (row,) = table_responses_for(compared).rows
    assert row[3:] == ("x1.00 to beyond x2.00", "1 of 2", "s1 16 : 16 x1.00, s2 over 32 : 16 x2.00")


def test_between_two_measurements_each_prompt_lies_on_its_own_straight_line(tmp_path: Path) -> None:
    # 32 responses in all. p 0 -> 1/2, q 1/4 -> 3/4; after 12 of them 3/8 of the way.
    run = one_run(tmp_path / "one", {0: {"p": "0000", "q": "1000"}, 4: {"p": "1100", "q": "1110"}}, groups=2)
    assert means_at(run, "cd4", 12) == {"p": 3 / 16, "q": 1 / 4 + 3 / 16}


def test_the_measurement_before_training_is_the_point_at_no_responses(tmp_path: Path) -> None:
    run = one_run(tmp_path / "one", {0: {"p": "0000", "q": "1000"}, 4: {"p": "1100", "q": "1110"}})
    assert means_at(run, "cd4", 0) == {"p": 0.0, "q": 0.25}


def test_only_prompts_of_both_measurements_have_a_line(tmp_path: Path) -> None:
    # 16 groups of 4 in 4 steps. Around 48 responses lie the measurements at 32 (p alone) and at 64.
    rows = {0: NOTHING, 2: {"p": "1000"}, 4: {"p": "1100", "q": "1111"}}
    run = one_run(tmp_path / "one", rows, groups=4)
    assert means_at(run, "cd4", 48) == {"p": 3 / 8}
    assert means_at(run, "cd4", 64) == {"p": 0.5, "q": 1.0}


def test_no_seed_that_reaches_it_is_a_lower_bound(tmp_path: Path) -> None:
    compared = make_curves(tmp_path, {1: QUARTER, 2: EIGHTH}, {1: HALF, 2: QUARTER})
    (row,) = table_responses_for(compared).rows
    assert row[3:5] == ("beyond x2.00", "0 of 2")


def test_seeds_of_one_method_that_spent_unequally_share_one_budget(tmp_path: Path) -> None:
    make_run(tmp_path / "plain-s1", {0: NOTHING, 4: NOTHING}, groups=2)
    make_run(tmp_path / "plain-s2", {0: NOTHING, 4: {"p": "1111", "q": "0000"}}, groups=4, seed=2)
    make_run(tmp_path / "plain-s3", {0: NOTHING, 4: NOTHING}, groups=1, seed=3)  # of no pair
    for seed in (1, 2):
        make_run(tmp_path / f"ours-s{seed}", {0: NOTHING, 4: NOTHING}, groups=3, seed=seed)
    ours, plain = methods_of(tmp_path)
    found = at_equal_responses(plain, ours, "cd4")
    assert not isinstance(found, str)
    assert (found.budget, found.seeds) == (32, (1, 2))
    # plain-s2 is half way to p = 1 after 32 of 64 responses: mean of 0, 0, 1/2, 0.
    assert (found.method, found.reference) == (1 / 8, 0.0)
