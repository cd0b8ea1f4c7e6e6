"""The paper's numbers beside ours, and which methods count as on-policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bapo.comparison.gather import gather
from bapo.comparison.on_policy import is_on_policy
from bapo.comparison.published import published, published_of, rollouts_of, section_of, type_of
from bapo.comparison.tables import table_1, table_2
from bapo.config.load import load_config
from bapo.types import Fate, Origin, Purpose
from tests.made_up_runs import evaluation_row, fate, write_run

AFTER = {"p": "1000", "q": "1100", "r": "1110", "s": "0000"}
WORSE = {"p": "0000", "q": "0000", "r": "1100", "s": "0000"}


def test_the_papers_numbers_stand_beside_ours(tmp_path: Path) -> None:
    write_run(tmp_path / "grpo-s1", preset="grpo", evaluations=[evaluation_row("cd4", 3, WORSE)])
    write_run(tmp_path / "bapo-s1", evaluations=[evaluation_row("cd4", 3, AFTER)])
    compared = gather([tmp_path / "grpo-s1", tmp_path / "bapo-s1"])
    table = table_1(compared, paper=True)
    assert table.header[-4:] == ("paper: cd4", "paper: accuracy", "paper: rollouts (maths)", "paper: type")
    assert [row[-4:] for row in table.rows] == [
        ("0.4", "0.7", "-", "-"), ("35.9", "49.4", "677k", "on"), ("47.5", "60.2", "733k", "off"),
    ]  # fmt: skip
    assert [row[-2:] for row in table_2(compared, paper=True).rows] == [
        ("3:47:00, x1.00", "-"),
        ("3:23:00, x0.89", "-"),
    ]
    fixed = gather([write_run(tmp_path / "bapo-fixed-high-s1", preset="bapo-fixed-high").path])
    assert table_2(fixed, paper=True).rows[0][-1] == "70 %"


def test_the_published_averages_are_those_of_their_rows() -> None:
    splits = {"math": ("aime24", "amc", "math500", "minerva", "olympiad")}
    for section in ("math", "planning", "planning_7b"):
        for name, row in published()[section].items():
            if "accuracy" in row:
                own = [row[split] for split in splits.get(section, ("cd34", "cd4"))]
                assert row["accuracy"] == pytest.approx(sum(own) / len(own), abs=0.011), (section, name)
    assert (rollouts_of("dapo"), rollouts_of("bapo-mini")) == (1921, None)
    assert [type_of(name) for name in ("grpo", "mopps", "repo", "remix", "bapo", "bapo-mini")] == [
        "on", "on", "off", "off", "off", None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "section"),
    [
        ({"task.name": "countdown"}, "planning"),
        ({"task.name": "countdown", "model.path": "Qwen/Qwen2.5-Math-1.5B"}, "planning"),
        ({"task.name": "countdown", "model.path": "Qwen/Qwen2.5-Math-7B-Instruct"}, "planning_7b"),
        ({"task.name": "countdown", "model.path": "models/7boats"}, "planning"),
        ({"task.name": "dataset", "task.reward": "my_rewards.py:exact"}, ""),
    ],
)
def test_a_run_stands_beside_the_papers_nearest_task_and_model(settings: dict[str, str], section: str) -> None:
    config = load_config(["bapo"], [part for key, value in settings.items() for part in (f"--{key}", value)])
    assert section_of(config) == section


def test_the_mathematics_task_stands_beside_table_1a(tmp_path: Path) -> None:
    config = load_config(["deploy/configs/math-1.5b.toml"], [])
    assert section_of(config) == "math"
    assert published_of(config, "bapo-without-x2") == {}
    task = ["--task.name", "dataset", "--task.reward", config.task.reward]
    write_run(tmp_path / "bapo-s1", evaluations=[evaluation_row("math500", 3, AFTER)], overrides=task)
    compared = gather([tmp_path / "bapo-s1"])
    table = table_1(compared, paper=True)
    assert table.header[-4:-2] == ("paper: math500", "paper: accuracy")
    assert [row[-4:] for row in table.rows] == [("82.8", "49.1", "-", "-"), ("89.2", "56.0", "733k", "off")]
    assert table_2(compared, paper=True).rows[0][-2] == "46:37:00, x1.00"  # 1 day, 22 hours and 37 minutes


# -- on- or off-policy


OLD_ROWS = fate("a", "0001", step=1, origin=Origin.X1, reason="replayed")
OTHERS = {1: [fate("a", "0001", step=1, origin=Origin.X1)], 2: [fate("b", "0011", step=2, origin=Origin.X1, version=2)]}


@pytest.mark.parametrize(
    ("extra", "overrides", "want"),
    [
        ([], [], True),
        ([], ["--cadence.slack", "1"], True),
        ([], ["--cadence.slack", "2"], False),  # AReaL: sampled up to two steps before
        ([], ["--learner.epochs", "2"], False),
        ([OLD_ROWS], [], False),  # RePO: rows that trained at step 1 are part of an item of X1 at step 2
        ([fate("c", "0001", step=2, origin=Origin.X1, version=0)], [], False),  # begun two steps ago
        ([fate("c", "0001", step=2, version=0)], [], True),  # the same, but it did not train
        ([fate("c", "0001", step=2, origin=Origin.X2, version=2, purpose=Purpose.REEVALUATE)], [], True),
        ([replace(fate("c", "0001", step=2, origin=Origin.X1, version=2), outcomes=b"\0\0\0\2")], [], False),  # LUFFY
        ([replace(fate("c", "0001", step=2, origin=Origin.X1, version=2), kind="sft")], [], False),  # ReLIFT
    ],
)
def test_a_method_is_on_policy_when_its_rows_train_once_and_at_once(
    tmp_path: Path, extra: list[Fate], overrides: list[str], want: bool
) -> None:
    groups = OTHERS | {2: [*OTHERS[2], *extra]}
    compared = gather([write_run(tmp_path / "one", preset="grpo", groups=groups, overrides=overrides).path])
    assert is_on_policy(compared.reference) is want
    assert table_1(compared).rows[1][-2] == ("on" if want else "off")
