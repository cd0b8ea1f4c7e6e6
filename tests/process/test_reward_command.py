"""`bapo reward test`: which rewards are fit for training, what it tells, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from bapo.cli.app import app
from bapo.config.load import load_config
from bapo.core.errors import ConfigError
from bapo.tasks.rewards import load_reward
from services.launcher.doctor.gold_checks import gold_answers
from services.launcher.doctor.situation import Situation

REWARDS = """
import os, time

def exact(prompt, text):
    return float(text == prompt.answer["answer"])

def always(prompt, text):
    return 1.0

def tagged(prompt, text):
    return float(text == f"<answer>{prompt.answer['answer']}</answer>")

def troubled(prompt, text):
    if prompt.text == "b":
        raise KeyError("nums")
    if prompt.text == "c":
        return None
    if prompt.text == "d":
        os._exit(3)
    return 0.5 if prompt.text == "e" else 1.0

def one_of_two(completions, **kwargs):
    return [1.0]

def graded(prompt, text):
    return 1.0 if text == prompt.answer["answer"] else 0.1 if text.isdigit() else 0.0

def nearly(prompt, text):
    return 1.0 if text == prompt.answer["answer"] else 1 - 1e-7

def ungraded(prompt, text):
    return None

def half_with_length(prompt, text):
    return (0.5, {"length": len(text)})

def a_list(prompt, text):
    return [1.0]

def nan(prompt, text):
    return float("nan")

def infinite(prompt, text):
    return float("inf")

def a_string(prompt, text):
    return "1.0"

def a_bool(prompt, text):
    return text == prompt.answer["answer"]

def too_much(prompt, text):
    return 100.0 if text == prompt.answer["answer"] else 0.0

def zero(prompt, text):
    return 0.0

def of_level(prompt, text):
    return float(prompt.answer["level"] > 0 and text == prompt.answer["answer"])

def signed(prompt, text):
    return 1.0 if text == prompt.answer["answer"] else -1.0
"""


def _run(tmp_path: Path, function: str, rows: list[Any], *options: str, reward: str | None = None) -> Result:
    (tmp_path / "rewards.py").write_text(REWARDS)
    data = tmp_path / "train.jsonl"
    data.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    name = f"{tmp_path / 'rewards.py'}:{function}" if reward is None else reward
    command = ["reward", "test", name, "--data", str(data), *options]
    return CliRunner().invoke(app, command)


def _rows(*answers: str) -> list[dict[str, str]]:
    return [{"prompt": name, "answer": answer} for name, answer in zip("abcdef", answers, strict=False)]


def test_a_reward_of_the_right_answers_and_no_others_is_fit(tmp_path: Path) -> None:
    result = _run(tmp_path, "exact", _rows("1", "2", "2", "3"))
    assert result.exit_code == 0, result.output
    assert "gold answers with reward 1   4 of 4 (100.0%)" in result.output
    assert "other answers rewarded 1  0 of 4" in result.output
    assert "suitable for training" in result.output


def test_a_reward_that_says_yes_to_everything_is_not_fit(tmp_path: Path) -> None:
    result = _run(tmp_path, "always", _rows("1", "2"))
    assert result.exit_code == 1
    assert "other answers rewarded 1  2 of 2" in result.output
    assert "also rewards incorrect answers" in result.output


def test_partial_credit_is_judged_by_the_rule_that_trains_it(tmp_path: Path) -> None:
    result = _run(tmp_path, "graded", _rows("1", "2", "three"))  # the others: "2" and "three" and "1"
    assert result.exit_code == 0, result.output
    assert "other answers rewarded 1  0 of 3" in result.output
    assert "with partial credit     2" in result.output
    assert "a group trains when its rewards differ" in result.output
    assert "algorithm.c1" not in result.output
    every = _run(tmp_path, "graded", _rows("1", "2", "3"))
    assert "algorithm.c1" in every.output  # no other answer has 0: what c1 = 0 calls hard never occurs


def test_several_rewards_are_tested_by_their_mean_and_shown_apart(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    rewards = json.dumps([{"function": f"{file}:exact", "weight": 3}, f"{file}:half_with_length", "task"])
    result = _run(tmp_path, "", _rows("1", "2"), "--json", reward=rewards)
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert found["gold"] == {"partly": 2}
    assert found["problems"][0].endswith("the reward of the gold answer is 0.9 (exact 1, half_with_length 0.5, task 1)")
    assert found["gold_details"]["reward_parts"] == {"exact": 1.0, "half_with_length": 0.5, "task": 1.0}
    assert found["others_details"]["reward_parts"] == {"exact": 0.0, "half_with_length": 0.5, "task": 0.0}
    assert found["gold_details"]["reward_facts"] == {"half_with_length/length": 1.0}


def test_one_of_several_rewards_that_fails_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    result = _run(tmp_path, "", _rows("1", "2"), reward=f'["{file}:exact", "{file}:too_much"]')
    assert result.exit_code == 1
    assert f"the reward '{file}:too_much' returned 100.0" in result.output


def test_a_difference_that_no_group_would_train_on_is_none(tmp_path: Path) -> None:
    result = _run(tmp_path, "nearly", _rows("1", "2"))
    assert result.exit_code == 1
    assert "other answers rewarded 1  2 of 2" in result.output


def test_every_kind_of_trouble_is_counted_and_told_with_its_row(tmp_path: Path) -> None:
    rows = [*_rows("1", "2", "3", "4", "5"), {"prompt": "f"}]
    result = _run(tmp_path, "troubled", rows, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["gold"] == {"right": 1, "verifier_error": 1, "ungraded": 1, "verifier_killed": 1, "partly": 1}
    assert (found["rows"], found["unreadable"], found["fit"]) == (6, 1, False)
    assert found["accuracy"] == pytest.approx(1 / 6)
    told = "\n".join(found["problems"])
    assert "raised KeyError: 'nums' (rewards.py line 15)" in told
    for row, what in [(2, "KeyError"), (3, "ungraded"), (4, "code 3"), (5, "gold answer is 0.5"), (6, "no answer")]:
        assert any(f"row {row}" in problem and what in problem for problem in found["problems"]), (row, told)


def test_a_reward_that_fails_on_wrong_answers_is_not_fit(tmp_path: Path) -> None:
    result = _run(tmp_path, "signed", _rows("1", "2"))
    assert result.exit_code == 1
    assert "gold answers with reward 1   2 of 2" in result.output
    assert "other answers rewarded 1  0 of 2; 2 failed" in result.output
    assert "set task.reward_range to the range" in result.output


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("ungraded", ["2 of 2", "None", "return 1"]),
        ("a_list", ["no number", "one number"]),
        ("nan", ["NaN", "return a number"]),
        ("infinite", ["infinity", "return a number"]),
        ("a_string", ["no number", "one number"]),
        ("too_much", ["outside", "--reward-range"]),
        ("zero", ["reward 0", "--gold-format"]),
        ("of_level", ["column", "--columns"]),
    ],
)
def test_the_last_line_is_the_verdict_with_its_reason_and_what_to_do(
    tmp_path: Path, function: str, words: list[str]
) -> None:
    result = _run(tmp_path, function, _rows("1", "2"))
    last = result.output.splitlines()[-1]
    assert result.exit_code == 1
    assert last.startswith("unsuitable: ")
    assert all(word in last for word in words), last


def test_a_bool_is_a_reward_and_a_row_without_an_answer_is_a_reason_of_its_own(tmp_path: Path) -> None:
    result = _run(tmp_path, "a_bool", _rows("1", "2"))
    assert (result.exit_code, result.output.splitlines()[-1]) == (0, "suitable for training")
    result = _run(tmp_path, "a_bool", [*_rows("1", "2"), {"prompt": "z"}])
    last = result.output.splitlines()[-1]
    assert "1 of 3 rows" in last
    assert "no answer" in last


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    assert isinstance(_run(tmp_path, "nothing", _rows("1")).exception, ConfigError)
    assert isinstance(_run(tmp_path, "exact", []).exception, ConfigError)
    assert isinstance(_run(tmp_path, "exact", _rows("1"), "--gold-format", "x").exception, ConfigError)


def test_a_function_of_groups_must_return_as_many_rewards_as_there_are_completions(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in _rows("1", "2", "3")))
    command = ["reward", "test", f"trl:{tmp_path / 'rewards.py'}:one_of_two", "--data", str(data)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    (problem,) = (line for line in result.output.splitlines() if line.startswith("- "))
    assert problem.startswith("- 3 rows: ")
    assert "returned [1.0] for 2 completions" in problem
    assert problem.endswith(f"; first: {data} row 1 ('1')")
    assert ".py line" not in problem  # ours, not the user's


@pytest.mark.parametrize(
    ("signature", "prefix"),
    [("completions, **kw", "trl"), ("prompts, completions, **kw", "trl"), ("data_source, solution_str", "verl")],
)
def test_a_function_of_another_framework_needs_its_prefix(tmp_path: Path, signature: str, prefix: str) -> None:
    (tmp_path / "mine.py").write_text(f"def f({signature}):\n    return 1.0\n")
    with pytest.raises(ConfigError, match=f"write {prefix}:"):
        load_reward(f"{tmp_path / 'mine.py'}:f")


INIT = ["init", "--model", "model", "--data", "train.jsonl"]


def _init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and data in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "level": 1, "source": "x"}\n')


def test_init_needs_no_list_of_the_columns_that_the_reward_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _init(tmp_path, monkeypatch)
    (tmp_path / "r.py").write_text("import bapo\n@bapo.reward\ndef score(completion, answer, level):\n    return 1.0\n")
    result = CliRunner().invoke(app, [*INIT, "--reward", "r.py:score"])
    assert result.exit_code == 0, result.exception
    assert "extra_columns" not in load_config(["run.toml"], []).task.options
    assert "--columns" not in result.stdout
    assert "warning" not in result.stdout


def test_init_says_when_the_reward_fails_on_the_first_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _init(tmp_path, monkeypatch)
    (tmp_path / "r.py").write_text("def score(completions, **kwargs):\n    return kwargs['nums']\n")
    result = CliRunner().invoke(app, [*INIT, "--reward", "trl:r.py:score"])
    assert "warning: train.jsonl row 1 ('2'): the reward 'trl:r.py:score' raised KeyError: 'nums'" in result.stdout
    (tmp_path / "r.py").write_text("def score(completions, **kwargs):\n    return [0] * len(completions)\n")
    result = CliRunner().invoke(app, [*INIT, "--force", "--reward", "trl:r.py:score"])
    assert "the reward of the gold answer is 0; task.options.gold_format" in result.stdout


def test_a_start_refuses_a_reward_that_fails_or_gives_0_to_the_gold_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _init(tmp_path, monkeypatch)
    (tmp_path / "r.py").write_text(
        "def fails(completions, **kw):\n    return [1.0]\n"
        "def zero(completions, **kw):\n    return [0.0] * len(completions)\n"
        "def level(completions, **kw):\n    return kw['level']\n"
    )
    for function, status in (("fails", "fail"), ("zero", "fail"), ("level", "ok")):
        options = [
            "--task.name",
            "dataset",
            "--task.options.path",
            "train.jsonl",
            "--task.reward",
            f"trl:r.py:{function}",
        ]
        config = load_config([], options)
        (check,) = gold_answers(Situation(config=config))
        assert check.status == status, check.detail


def test_gold_answers_in_deepscalers_layout_are_fit_for_mathematics(tmp_path: Path) -> None:
    answers = [
        "\\frac{1}{2}",
        "-\\frac{2}{3}",
        "26",
        "\\text{Monday}",
        "1,2,3",
        "[0,1)",
        "50\\%",
        "x^2+1",
        "$\\sqrt{2}$",
    ]
    rows = [{"problem": f"p{i}", "answer": answer, "solution": "..."} for i, answer in enumerate(answers)]
    data = tmp_path / "deepscaler.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        "reward",
        "test",
        "bapo.tasks.mathematics:boxed",
        "--data",
        str(data),
        "--gold-format",
        "\\boxed{{answer}}",
    ]
    result = CliRunner().invoke(app, [*command, "--timeout-s", "60"])
    assert result.exit_code == 0, result.output
    assert "gold answers with reward 1   9 of 9 (100.0%)" in result.output
    assert "other answers rewarded 1  0 of 9" in result.output
