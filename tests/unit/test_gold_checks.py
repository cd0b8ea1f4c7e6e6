"""Gold answers of the first rows, and a row of every shape, graded before a start. Custom rewards: tests/process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bapo.config.tree import Config
from services.launcher.doctor import gold_checks
from services.launcher.doctor.checks import Check
from services.launcher.doctor.gold_checks import gold_answers
from services.launcher.doctor.here_grader import HereGrader
from services.launcher.doctor.situation import Situation

REWARDS = """
def level(completions, level, **kwargs):
    return [float(value > 0) for value in level]

def nested(prompt, text):
    return float(prompt.answer["extra_info"]["weight"] > 0)

def score(solution_str, ground_truth, extra_info=None, **kwargs):
    return float(len(extra_info["tests"]) > 0)

def boxed(prompt, text):
    return float(text == "\\\\boxed{" + str(prompt.answer["answer"]) + "}")

def zero(prompt, text):
    return 0.0
"""


def _situation(tmp_path: Path, rows: Sequence[dict[str, Any]], **task: Any) -> Situation:
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"p{i}", **row}) + "\n" for i, row in enumerate(rows)))
    options = {"path": str(data), **task.pop("options", {})}
    return Situation(config=Config.model_validate({"task": {"name": "dataset", "options": options, **task}}))


def _check(situation: Situation) -> Check:
    (check,) = gold_answers(situation)
    return check


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of rewards, which are graded in this process instead of one of their own."""
    (tmp_path / "r.py").write_text(REWARDS)

    def grader(situation: Situation) -> HereGrader:
        return HereGrader(situation.task, situation.config.task)

    monkeypatch.setattr(gold_checks, "_grader", grader)
    return tmp_path / "r.py"


def test_right_gold_answers_are_sound(tmp_path: Path) -> None:
    check = _check(_situation(tmp_path, [{"answer": str(i)} for i in range(20)]))
    assert (check.status, check.detail) == ("ok", "8 of 8 rewarded 1")


def test_a_run_in_which_gold_gets_0_is_refused_with_its_row_and_a_way_on(tmp_path: Path) -> None:
    rows = [{"answer": str(i)} for i in range(4)]
    wrong = {"options": {"gold_format": "the answer is {answer}"}}
    check = _check(_situation(tmp_path, rows, **wrong))
    assert check.status == "fail"
    for part in ("train.jsonl row 1", "'the answer is 0'", "is 0", "4 of 4 rows", "gold_format", "check_gold = false"):
        assert part in check.detail
    assert _check(_situation(tmp_path, rows, check_gold=False, **wrong)).status == "warn"


def test_a_resumed_run_is_only_told(tmp_path: Path) -> None:
    situation = _situation(tmp_path, [{"answer": "1"}], options={"gold_format": "x{answer}"})
    situation.is_resumed = True
    assert _check(situation).status == "warn"


@pytest.mark.parametrize(("num_wrong", "status"), [(1, "warn"), (2, "warn"), (3, "fail")])
def test_a_few_wrong_rows_are_errors_of_the_data(custom: Path, num_wrong: int, status: str) -> None:
    (custom.parent / "r.py").write_text("def f(prompt, text):\n    return float(prompt.answer['answer'] != '0')\n")
    rows = [{"answer": "0" if i < num_wrong else str(i + 1)} for i in range(20)]
    situation = _situation(custom.parent, rows, reward=f"{custom}:f", options={"gold_format": "{answer}"})
    situation.num_gold = 20
    assert _check(situation).status == status


def test_an_unknown_format_is_guessed_and_otherwise_asked_for(custom: Path) -> None:
    rows = [{"answer": "7"}]
    assert _check(_situation(custom.parent, rows, reward=f"{custom}:boxed")).status == "ok"
    check = _check(_situation(custom.parent, rows, reward=f"{custom}:zero"))
    assert (check.status, "gold_format" in check.detail, "####" in check.detail) == ("fail", True, True)


@pytest.mark.parametrize(
    ("reward", "good", "odd"),
    [
        ("trl:{file}:level", {"level": 1}, {}),  # a parameter without its column
        ("trl:{file}:level", {"level": 1}, {"level": None}),
        ("trl:{file}:level", {"level": 1}, {"level": "hard"}),
        ("verl:{file}:score", {"extra_info": {"tests": [1]}}, {"extra_info": {}}),
    ],
)
def test_a_column_that_some_rows_lack_is_refused_with_its_row(
    custom: Path, reward: str, good: dict[str, Any], odd: dict[str, Any]
) -> None:
    rows: list[dict[str, Any]] = [{"answer": "1", **good} for _ in range(30)]
    rows[20] = {"answer": "1", **odd}
    rows[25] = {"answer": "1", **odd}
    options = {"gold_format": "{answer}"}
    if "verl" in reward:
        options["extra_columns"] = ["extra_info"]
    check = _check(_situation(custom.parent, rows, reward=reward.format(file=custom), options=options))
    assert check.status == "fail"
    assert "train.jsonl row 21 and 1 more rows with these columns" in check.detail


def test_a_row_of_a_held_out_file_is_graded_too(custom: Path) -> None:
    test = custom.parent / "test.jsonl"
    test.write_text('{"prompt": "t1", "answer": "1", "level": 1}\n{"prompt": "t2", "answer": "1"}\n')
    options = {"gold_format": "{answer}", "held_out": {"test": str(test)}}
    rows = [{"answer": "1", "level": 2}]
    check = _check(_situation(custom.parent, rows, reward=f"trl:{custom}:level", options=options))
    assert (check.status, "test.jsonl row 2" in check.detail) == ("fail", True)
