"""The service `check` of docker-compose.yml: what it refuses before workers start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bapo.runtime.run_directory.layout import RunDirectory

REWARD = "def score(prompt, text):\n    return float(text == prompt.answer['answer'])\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(9)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARD)
    return tmp_path


@pytest.fixture
def run(folder: Path) -> RunDirectory:
    """As `bapo create` makes it."""
    overrides = {
        "run.root": folder / "outputs",
        "run.name": "mine",
        "model.path": "models/countdown-tiny",
        "task.name": "dataset",
        "task.options.path": folder / "train.jsonl",
        "task.reward": f"{folder / 'rewards.py'}:score",
        "algorithm.batch_size": 8,
        "learner.minibatch_size": 8,
    }
    command = ["bapo.cli", "create", "grpo", *(f"--{key}={value}" for key, value in overrides.items())]
    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True, timeout=120)
    return RunDirectory.open(folder / "outputs/mine")


def check(run: RunDirectory, *flags: str) -> tuple[int, str]:
    """Exit code and stderr."""
    command = [sys.executable, "-m", "services.launcher", "check", "--run-dir", str(run.path), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


def test_a_reward_that_grades_no_gold_answer_is_refused_until_it_does(folder: Path, run: RunDirectory) -> None:
    (folder / "rewards.py").write_text(REWARD.replace("float(", "0 * float("))
    for _ in range(2):
        code, text = check(run)
        assert code == 2
        assert "task.check_gold = false" in text
    (folder / "rewards.py").write_text(REWARD)
    assert check(run)[0] == 0


def test_a_run_continues_on_another_reward_only_if_the_user_accepts_it(folder: Path, run: RunDirectory) -> None:
    assert [check(run)[0], check(run)[0]] == [0, 0]
    (folder / "rewards.py").write_text(REWARD + "# tuned\n")
    code, text = check(run)
    assert code == 2
    assert f"reward {folder}/rewards.py has changed" in text
    assert "or continue with BAPO_ACCEPT_CHANGES=1 docker compose up -d" in text
    assert [check(run, "--accept-changes")[0], check(run)[0]] == [0, 0]
    assert len(run.read_run()["accepted_changes"]) == 1
