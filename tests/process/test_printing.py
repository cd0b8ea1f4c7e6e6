"""A process never ends because its terminal or log lacks a letter, or a grading because of what a reward prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from bapo.config.tree import TaskConfig
from bapo.tasks.grading.pool import GraderPool
from tests.support.factories import make_prompt

ROOT = Path(__file__).parents[2]
STRAIGHT = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
POOR = [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", **STRAIGHT}, {"LANG": "C", **STRAIGHT}, {"LC_ALL": "POSIX"}]
REWARDS = "tests.process.verifiers_that_misbehave"


def poor(settings: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))} | settings


@pytest.mark.parametrize("settings", POOR, ids=str)
def test_a_command_prints_a_replaced_character_where_the_terminal_lacks_it(settings: dict[str, str]) -> None:
    code = "import sys, typer, bapo.cli.app as it; it.app = lambda: typer.echo('run gr\\xf6\\xdfe \\u2713'); it.main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, env=poor(settings), check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.startswith(b"run gr")


def test_the_launcher_prints_the_same_way() -> None:
    code = (
        "import sys; sys.argv = ['launcher', 'watch', '--run-dir', 'gr\\xf6\\xdfe \\u2713']; "
        "import services.launcher.__main__ as it; "
        "it.watch = lambda *_: 0; code = it.main(); print('gr\\xf6\\xdfe \\u2713'); sys.exit(code)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, env=poor(POOR[0]), check=False)
    assert ended.returncode == 2, ended.stderr  # no run directory: the message repeats the name
    assert ended.stdout == b"gr??e ?\n"


@pytest.mark.parametrize("reward", ["print_strange_text", "print_to_a_full_disk"])
def test_what_a_reward_prints_never_fails_a_grading(reward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with closing(GraderPool(TaskConfig(reward=f"{REWARDS}:{reward}"), num_children=1)) as pool:
        assert pool.grade(make_prompt(), ["a", "b"]).rewards.tolist() == [1.0, 1.0]


def test_every_entry_point_prepares_its_streams() -> None:
    starts = re.compile(r"\b(run_process|print_any_text|never_fail_to_print)\(")
    silent = {"services/launcher/supervision/subreaper.py", "bapo/config/document.py", "bapo/cli/document.py"}
    silent |= {"bapo/cli/__main__.py"}  # calls bapo.cli.app
    for package in ("bapo", "services", "rollout_server", "learner", "buffer_service"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            name = str(path.relative_to(ROOT))
            if 'if __name__ == "__main__":' in text and name not in silent:
                assert starts.search(text), name
