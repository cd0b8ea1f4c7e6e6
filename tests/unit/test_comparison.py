"""Runs beside each other: tables checked by hand, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from bapo.cli.app import app
from bapo.config.load import load_config
from bapo.core.errors import ConfigError
from bapo.core.types import Origin, Outcome, Purpose
from studies.compare.accuracy import difference, final_accuracy
from studies.compare.figures import response_lengths
from studies.compare.gather import Compared, gather
from studies.compare.prompts import (
    bins_by_epoch,
    floor_matrix,
    held_out_matrix,
    looks,
    matrix_of,
    training_matrix,
)
from studies.compare.tables import hyper_parameters, table_1, table_4, table_against
from tests.support.synthetic_runs import evaluation_row, metrics_row, result, write_run

BASE = {"p": "0000", "q": "1000", "r": "1100", "s": "0000"}
OTHER_BASE = {"p": "0000", "q": "0000", "r": "1110", "s": "0100"}
AFTER = {"p": "1000", "q": "1100", "r": "1110", "s": "0000"}
WORSE = {"p": "0000", "q": "0000", "r": "1100", "s": "0000"}


def make_pair(root: Path) -> Compared:
    """plain and ours with seeds 1 and 2; ours is better on three prompts of each seed and worse on none."""
    for seed, base in ((1, BASE), (2, OTHER_BASE)):
        for method, final in (("plain", WORSE), ("ours", AFTER)):
            evaluations = [evaluation_row("cd4", 1, base), evaluation_row("cd4", 3, final)]
            preset = {"plain": "grpo", "ours": "bapo"}[method]
            extra = [result("b", "0000", step=2, purpose=Purpose.REEVALUATE)] if method == "ours" else []
            write_run(
                root / f"{method}-s{seed}", seed=seed, preset=preset, evaluations=evaluations,
                groups={1: [result("a", "0001", step=1, origin=Origin.X1)], 2: [result("b", "0000", step=2), *extra]},
            )  # fmt: skip
    return gather([root / f"{method}-s{seed}" for method in ("plain", "ours") for seed in (1, 2)])


def test_runs_that_differ_in_the_seed_alone_are_one_method(tmp_path: Path) -> None:
    compared = make_pair(tmp_path)
    assert [(method.name, method.seeds) for method in compared.methods] == [("plain", (1, 2)), ("ours", (1, 2))]
    assert (compared.reference.name, compared.splits) == ("plain", ("cd4",))


def test_a_run_twice_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "one")
    with pytest.raises(ConfigError, match="seed 1"):
        gather([tmp_path / "one", tmp_path / "one"])


@pytest.mark.parametrize(
    ("overrides", "final", "wanted"),
    [
        (["--evaluation.num_prompts_final", "7"], WORSE, "evaluation.num_prompts_final = 1000, ours-s1 with 7"),
        (["--rollout.temperature", "0.5"], WORSE, "rollout.temperature = 1.0, ours-s1 with 0.5"),
        ([], {"p": "00", "q": "00", "r": "00", "s": "00"}, "num_samples of cd4 = 4, ours-s1 with 2"),
        ([], {"p": "0000", "other": "0000"}, "4 prompts of cd4, ours-s1 with 2, only 1 prompts in common"),
    ],
)
def test_runs_that_were_measured_differently_are_refused_with_the_difference(
    tmp_path: Path, overrides: list[str], final: dict[str, str], wanted: str
) -> None:
    write_run(tmp_path / "plain-s1", evaluations=[evaluation_row("cd4", 3, WORSE)])
    write_run(tmp_path / "ours-s1", evaluations=[evaluation_row("cd4", 3, final)], overrides=overrides)
    with pytest.raises(ConfigError) as caught:
        gather([tmp_path / "plain-s1", tmp_path / "ours-s1"])
    assert f"plain-s1 was evaluated with {wanted}" in str(caught.value)
    assert "are not comparable" in str(caught.value)


# -- table 1 and differences


def test_accuracy_is_over_seeds_and_prompts(tmp_path: Path) -> None:
    plain, ours = make_pair(tmp_path).methods
    # plain: prompt means 0, 0, 1/2, 0 -> 1/8; ours: 1/4, 1/2, 3/4, 0 -> 3/8; both seeds alike.
    found, other = final_accuracy(plain, "cd4"), final_accuracy(ours, "cd4")
    assert found is not None
    assert other is not None
    assert (found.mean, other.mean) == (0.125, 0.375)
    # Sample variance of (0, 0, .5, 0) is 1/16: half width t(3) sqrt(1/64).
    assert found.high - found.mean == pytest.approx(3.182446 / 8, rel=1e-5)


def test_methods_are_compared_on_pairs(tmp_path: Path) -> None:
    compared = make_pair(tmp_path)
    plain, ours = compared.methods
    found = difference(plain, ours, "cd4")
    assert found is not None
    assert found.mean == 0.25
    (row,) = table_against(compared).rows
    assert row[:3] == ("ours", "plain", "cd4")
    assert row[3].startswith("+25.0 [")


def test_table_1_has_rollouts_type_and_the_base_model(tmp_path: Path) -> None:
    table = table_1(make_pair(tmp_path))
    assert table.header == ("method", "seeds", "cd4", "rollouts", "type", "staleness")
    base, plain, ours = table.rows
    # Base: means of seed 1: 0 1/4 1/2 0, of seed 2: 0 0 3/4 1/4 -> 7/32.
    assert base[2].startswith("21.9 [")
    assert (plain[1], plain[3:]) == ("2", ("8", "on", "1.0"))
    assert ours[3:5] == ("12", "off")  # v = 5
    assert plain[2].startswith("12.5 [0.0, ")  # an accuracy is never below 0


def test_the_preset_bapo_has_the_papers_hyper_parameters() -> None:
    rows = list(hyper_parameters(load_config(["bapo"], [])))
    assert [row[:2] for row in rows if row[2] != row[3]] == []
    assert len(rows) == 22  # of the 24 of table 3: there is no top-k, which is off there, and no GAE without a critic
    assert ("c2 range", "algorithm.c2_range", "[0.125, 0.5]", "[0.125, 0.5]") in rows


def test_table_4_has_the_papers_sets_next_to_the_problems_of_the_runs(tmp_path: Path) -> None:
    overrides = ["--task.name", "countdown"]
    groups = {1: [result("a", "0001", step=1), result("b", "0001", step=1)], 2: [result("a", "0011", step=2)]}
    measured = [evaluation_row("cd4", 3, WORSE)]
    path = write_run(tmp_path / "one", overrides=overrides, groups=groups, evaluations=measured).path
    assert table_4(gather([path])).rows == (
        ("training", "2", "-", "49,000"),
        ("cd4", "4", "4", "200"),
        ("cd34", "-", "-", "200"),
    )


FIVE = ("aime24", "amc", "math500", "minerva", "olympiad")


def test_a_run_of_mathematics_has_the_papers_table_1(tmp_path: Path) -> None:
    # Base: 1/4 in each set; after: 1/4, 2/4, 3/4, 4/4, 0 -> average 1/2.
    after = ("1000", "1100", "1110", "1111", "0000")
    evaluations = [evaluation_row(split, 1, {"p": "1000", "q": "1000"}) for split in FIVE]
    evaluations += [evaluation_row(split, 3, {"p": a, "q": a}) for split, a in zip(FIVE, after, strict=True)]
    run = write_run(tmp_path / "mine", preset="bapo", evaluations=evaluations, overrides=["--task.name", "mathematics"])
    table = table_1(gather([run.path]), paper=True)
    own = ("method", "seeds", *FIVE, "average", "rollouts", "type", "staleness")
    assert table.header == (*own, *(f"paper: {c}" for c in (*FIVE, "accuracy", "rollouts (maths)", "type")))
    base, ours = (dict(zip(table.header, row, strict=True)) for row in table.rows)
    assert (base["average"], ours["average"]) == ("25.0", "50.0")
    assert (base["paper: aime24"], ours["paper: aime24"], ours["paper: accuracy"]) == ("28.8", "38.5", "56.0")
    assert ours["paper: rollouts (maths)"] == "733k"
    printed = CliRunner().invoke(app, ["report", str(run.path), "--paper"], env={"COLUMNS": "300"})
    assert printed.exit_code == 0, printed.output
    assert "olympiad" in printed.output
    assert "50.0" in printed.output


# -- migration


def test_the_migration_matrix_by_hand(tmp_path: Path) -> None:
    run = gather([write_run(tmp_path / "one", evaluations=[
        evaluation_row("cd4", 1, {"p": "0000", "q": "1000", "r": "1100", "s": "1111", "t": "0000"}),
        evaluation_row("cd4", 3, {"p": "1000", "q": "0000", "r": "1100", "s": "1110", "t": "0000"}),
    ]).path]).reference.runs[0]  # fmt: skip
    found = held_out_matrix([run], "cd4")
    assert found is not None
    assert found.counts == (
        (1, 1, 0, 0, 0),  # t stays at 0/4, p rises to 1/4
        (1, 0, 0, 0, 0),  # q is lost
        (0, 0, 1, 0, 0),  # r stays
        (0, 0, 0, 0, 0),
        (0, 0, 0, 1, 0),  # s falls from 4/4 to 3/4
    )
    assert (found.total, found.better, found.worse) == (5, 1, 2)
    assert held_out_matrix([run], "cd34") is None


def test_the_same_prompts_are_followed_at_the_measurements_nearest_to_the_papers_steps(tmp_path: Path) -> None:
    # Ten steps: 150/471 and 300/471 of them are 3.2 and 6.4, nearest to steps 4 and 6 of those measured: 2, 4, 6, 10.
    measured = {
        1: {"p": "0000", "q": "1100", "r": "1111"},
        3: {"p": "1111", "q": "1111"},
        5: {"p": "1000", "q": "1100"},
        7: {"p": "1000", "q": "0000"},
        11: {"p": "1111", "q": "1000", "r": "0000"},
    }
    evaluations = [evaluation_row("cd4", version, right) for version, right in measured.items()]
    metrics = [metrics_row(step) for step in range(1, 11)]
    runs = gather([write_run(tmp_path / "one", metrics=metrics, evaluations=evaluations).path]).reference.runs
    # r was not measured on the way, so it is not followed; p begins at 0/4, q at 2/4.
    assert [(look.step, look.matrix) for look in looks(runs, ["cd4"])] == [
        (4, matrix_of([(0, 1), (2, 2)], 4)),
        (6, matrix_of([(0, 1), (2, 0)], 4)),
        (10, matrix_of([(0, 4), (2, 1)], 4)),
    ]


VISITS = {
    1: [result("a", "0000", step=1), result("b", "0000", step=1), result("c", "0100", step=1, origin=Origin.X1)],
    2: [
        result("d", "0000", step=2, origin=Origin.X1),  # GRPO trains it without an advantage: that moves nothing
        result("a", "0110", step=2, origin=Origin.X2, purpose=Purpose.REEVALUATE),
        result("e", "0000", step=2),
    ],
    3: [result("a", "0110", step=2, origin=Origin.X3, group_id="a@2reevaluate", reason="reused")],
    4: [result("a", "1110", step=4, origin=Origin.X1), result("b", "0000", step=4), result("c", "0000", step=4)],
    5: [result("d", "1000", step=5, origin=Origin.X1)],
}


def test_training_prompts_move_from_their_first_fresh_visit_to_their_last(tmp_path: Path) -> None:
    metrics = [metrics_row(step) for step in range(1, 6)]
    run = gather([write_run(tmp_path / "one", metrics=metrics, groups=VISITS).path]).reference.runs[0]
    matrix = training_matrix([run])
    assert matrix == matrix_of([(0, 3), (0, 0), (1, 0), (0, 1)], 4)
    assert bins_by_epoch(run) == [[4, 1, 0, 0, 0], [2, 1, 0, 1, 0]]


def test_an_experts_row_is_no_response_of_figures_7_and_15_and_no_length(tmp_path: Path) -> None:
    """Groups of three sampled responses of 10 tokens and an expert's solution: 0 correct, and later 1."""
    expert = bytes([Outcome.GRADED] * 3 + [Outcome.EXPERT])
    visits = [replace(result("a", rewards, step=1), outcomes=expert, num_tokens=30) for rewards in ("0001", "1001")]
    settings = load_config(["luffy"], ["--algorithm.group_size=4", "--task.name=countdown"])
    run: Any = SimpleNamespace(config=settings, sampled=[(step, [group]) for step, group in enumerate(visits, start=1)])
    assert bins_by_epoch(run) == [[1, 0, 0, 0], [0, 1, 0, 0]]
    assert training_matrix([run]) == matrix_of([(0, 1)], 3)
    assert response_lengths(run) == [(1, 10.0), (2, 10.0)]


def test_chance_is_the_base_model_measured_by_another_seed(tmp_path: Path) -> None:
    runs = [run for method in make_pair(tmp_path).methods for run in method.runs]
    found = floor_matrix(runs, "cd4")
    assert found is not None
    # Seed 1 against 2: p 0-0, q 1-0, r 2-3, s 0-1; and 2 against 1: p 0-0, q 0-1, r 3-2, s 1-0.
    assert (found.total, found.better, found.worse) == (8, 3, 3)
    assert floor_matrix(runs[:1], "cd4") is None
