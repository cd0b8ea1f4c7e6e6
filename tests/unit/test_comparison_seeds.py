"""Which runs are seeds of a number, what is said of the others, and base models apart from each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bapo.cli.app import app
from bapo.core.errors import ConfigError
from studies.compare.figures import before_and_after, held_out_stacks
from studies.compare.gather import Compared, gather, remarks
from studies.compare.prompts import floor_matrix, named_bases
from studies.compare.tables import table_1, table_2, table_dynamics, table_pass_at_k, table_rescued
from tests.support.synthetic_runs import evaluation_row, metrics_row, result, write_run

NONE, ALL = {"p": "0000", "q": "0000"}, {"p": "1111", "q": "1111"}


def make_run(
    root: Path, name: str, measured: Mapping[int, Mapping[str, str]], *, steps: int = 4, model: str = ""
) -> Path:
    """A run of ten planned steps, so many of them done, with one group of 4 responses in each; measured after steps."""
    path = root / name
    write_run(
        path, seed=int(name[-1]), preset="grpo",
        metrics=[metrics_row(step) for step in range(1, steps + 1)],
        groups={step: [result(f"t{step}", "0001", step=step)] for step in range(1, steps + 1)},
        evaluations=[evaluation_row("cd4", step + 1, right) for step, right in measured.items()],
        overrides=["--run.num_steps", "10", *(["--model.path", model] if model else [])],
        status="running" if max(measured) < steps else "finished",
    )  # fmt: skip
    return path


def cells(compared: Compared, *columns: str) -> list[tuple[str, ...]]:
    """These columns of Table 1."""
    table = table_1(compared)
    return [tuple(row[table.header.index(column)] for column in columns) for row in table.rows]


def printed(*arguments: object) -> str:
    """What it prints as its answer: a slow machine also gets a line of progress, on stderr."""
    ended = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "300"}, catch_exceptions=False)
    return ended.stdout


# -- seeds
@pytest.fixture
def running(tmp_path: Path) -> list[Path]:
    """Seed 2 of ours has sampled 4 of 16 responses and was measured before training alone."""
    found = [make_run(tmp_path, f"plain-s{seed}", {0: NONE, 4: NONE}) for seed in (1, 2)]
    return [*found, make_run(tmp_path, "ours-s1", {0: NONE, 4: ALL}), make_run(tmp_path, "ours-s2", {0: NONE}, steps=1)]


def test_a_run_that_was_measured_only_before_training_is_no_seed_of_any_table_and_is_named(running: list[Path]) -> None:
    compared = gather(running)
    assert cells(compared, "method", "seeds", "rollouts") == [
        ("base model", "-", "-"), ("plain", "2", "16"), ("ours", "1", "16"),
    ]  # fmt: skip
    assert [row[1] for row in table_2(compared).rows] == ["4", "4"]
    found = remarks(compared)
    assert found[0] == "excluded: ours-s2 (evaluated only before training)"
    assert "seeds: plain 1 2; ours 1" in found


def test_a_method_without_a_measurement_after_training_has_its_costs_and_no_seed(running: list[Path]) -> None:
    compared = gather([running[0], running[3]])
    assert cells(compared, "method", "seeds", "cd4", "rollouts")[2] == ("ours", "0", "-", "4")
    assert "ours-s2 was evaluated only before training" in remarks(compared)


def test_seeds_are_counted_for_each_split(tmp_path: Path) -> None:
    # Before and after training at two temperatures; on the way of seed 2, so far, at one.
    paths = [
        make_run(tmp_path, "ours-s1", {0: NONE, 10: ALL}, steps=10),
        make_run(tmp_path, "ours-s2", {0: NONE, 2: ALL}),
    ]
    for path, steps in zip(paths, ((0, 10), (0,)), strict=True):
        rows = [evaluation_row("cd4@0.3", step + 1, NONE) for step in steps]
        with (path / "evaluations.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    compared = gather(paths)
    assert cells(compared, "seeds")[1] == ("1 to 2",)
    assert remarks(compared)[:2] == [
        "ours-s2 was evaluated only before training (cd4@0.3)", "ours-s2 was last evaluated after step 2 of 10 (cd4)",
    ]  # fmt: skip


@pytest.fixture
def patient(tmp_path: Path) -> Compared:
    """Seeds that ended after 2, 3 and 4 steps: both prompts of each became better, in seed 1 the least."""
    final = {1: {"p": "1000", "q": "1000"}, 2: ALL, 3: ALL}
    return gather(
        [make_run(tmp_path, f"ours-s{seed}", {0: NONE, seed + 1: final[seed]}, steps=seed + 1) for seed in (1, 2, 3)]
    )


def test_each_seed_counts_at_its_own_end(patient: Compared) -> None:
    table = table_dynamics(patient)
    assert table.rows[1][table.header.index("held out b:w")] == "6:0"
    assert table_2(patient).rows[0][1] == "3 (2 to 4)"


def test_figures_show_each_seed_at_its_own_end(patient: Compared) -> None:
    # After training 2 of 6 prompts at 1/4 and 4 at 4/4; before, all at 0/4.
    figure, stacks = before_and_after(patient), held_out_stacks(patient)
    assert not isinstance(figure, str)
    assert not isinstance(stacks, str)
    before, after = figure.axes[0].containers
    assert [bar.get_height() for bar in before] == [1, 0, 0, 0, 0]
    assert [bar.get_height() for bar in after] == pytest.approx([0, 1 / 3, 0, 0, 2 / 3])
    shares = [tuple(bar.get_width() for bar in part) for part in stacks.axes[0].containers]
    assert shares == [(1, 0), (0, pytest.approx(1 / 3)), (0, 0), (0, 0), (0, pytest.approx(2 / 3))]


# -- what must be known before any number
def test_json_has_the_remarks_as_its_last_table(running: list[Path]) -> None:
    *tables, last = json.loads(printed("compare", *running, "--json"))
    assert [table["key"] for table in tables][:2] == ["table-1", "pass-at-k"]
    assert (last["key"], last["header"]) == ("remarks", ["remark"])
    assert [line for (line,) in last["rows"]] == remarks(gather(running))


def test_table_1_of_the_paper_has_the_remarks_above_it(running: list[Path]) -> None:
    text = printed("report", *running, "--paper")
    assert text.startswith("excluded: ours-s2 (evaluated only before training)\n")
    assert text.index("excluded") < text.index("Table 1")


def test_table_1_of_the_paper_knows_the_methods_that_it_is_against(running: list[Path]) -> None:
    assert "Table 1" in printed("report", *running, "--paper", "--against", "ours")
    with pytest.raises(ConfigError, match="--against nothing: unknown method"):
        printed("report", *running, "--paper", "--against", "nothing")


# -- base models
SMALL, LARGE = "models/chain-tiny", "models/countdown-tiny"


@pytest.fixture
def two_models(tmp_path: Path) -> Compared:
    """Two seeds from a model that solves nothing, two from one that solves everything; all solve everything then."""
    return gather(
        [
            make_run(tmp_path, f"{name}-s{seed}", {0: base, 4: ALL}, model=model)
            for name, model, base in (("small", SMALL, NONE), ("large", LARGE, ALL))
            for seed in (1, 2)
        ]
    )


def test_each_base_model_has_its_own_row(two_models: Compared) -> None:
    small, large = named_bases(two_models)
    assert small.startswith(f"base model ({SMALL}, ")
    assert large.startswith(f"base model ({LARGE}, ")
    assert cells(two_models, "method", "cd4")[:2] == [(small, "0.0 [0.0, 0.0]"), (large, "100.0 [100.0, 100.0]")]
    passed = table_pass_at_k(two_models)
    assert passed.header[2:4] == (small, large)
    assert passed.rows[0][2:4] == ("0.0 [0.0, 0.0]", "100.0 [100.0, 100.0]")
    assert [row[0] for row in table_1(two_models, paper=True).rows] == [small, large, "small", "large"]


def test_chance_is_within_one_base_model(two_models: Compared) -> None:
    table = table_dynamics(two_models)
    column = table.header.index("held out b:w")
    assert [row[column] for row in table.rows] == ["0:0", "0:0", "4:0", "0:0"]
    assert "The first 2 rows are chance" in table.note


def test_figure_13_has_a_bar_for_each_base_model(two_models: Compared) -> None:
    stacks = held_out_stacks(two_models)
    assert not isinstance(stacks, str)
    unsolved = stacks.axes[0].containers[0]
    assert [bar.get_width() for bar in unsolved] == [1, 0, 0, 0]  # small, large, and both after training


def test_an_adapter_and_all_weights_are_trained_from_one_base_model(tmp_path: Path) -> None:
    for seed, lora in ((1, []), (2, ["--model.lora", "{ rank = 4 }"])):
        rows = [evaluation_row("cd4", 1, NONE), evaluation_row("cd4", 3, ALL)]
        write_run(tmp_path / f"{'lora' if lora else 'whole'}-s{seed}", seed=seed, evaluations=rows, overrides=lora)
    compared = gather([tmp_path / "whole-s1", tmp_path / "lora-s2"])
    assert cells(compared, "method") == [("base model",), ("whole",), ("lora",)]
    assert table_rescued(compared).rows[0][0] == "floor: the base model again"
    (runs,) = named_bases(compared).values()
    assert floor_matrix(runs, "cd4") is not None
