"""`bapo.train` and `bapo.Run` from scripts and notebooks: what they stream, and that nothing is left when they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

import bapo
from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.launch import REPOSITORY
from tests.support.wait import wait_until

SCRIPTED = {
    "run": {"num_steps": 2},
    "rollout": {"engine": "scripted"},
    "algorithm": {"batch_size": 8},
    "learner": {"minibatch_size": 4, "device": "cpu"},
    "evaluation": {"every": 0, "num_prompts_final": 4, "temperatures": []},
    "checkpoint": {"keep_best": 0},
}
WAIT_S = 240.0


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def test_the_example_notebook_trains_measures_and_exports(tmp_path: Path) -> None:
    settings = json.dumps(SCRIPTED | {"run": {"num_steps": 2, "root": str(tmp_path)}})
    notebook = REPOSITORY / "examples" / "notebook.ipynb"
    assert all(not cell.get("outputs") for cell in json.loads(notebook.read_text())["cells"])
    command = [sys.executable, "-P", str(REPOSITORY / "tests/support/run_notebook.py"), str(notebook), settings]
    done = subprocess.run(
        command, cwd=notebook.parent, env=environment(), capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step") and "reward" in line] == ["1", "2"]
    run = RunDirectory.open(tmp_path / "run-001")
    assert run.read_run()["status"] == "finished"
    assert (run.path / "reward.py").read_text().count("def equation") == 1
    assert f'reward = "{run.path}/reward.py:equation"' in run.config_path.read_text()
    assert (run.checkpoint_dir(2) / "hf" / "model.safetensors").is_file()


SCRIPT = """
import signal
import bapo

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it

def score(prompt, text):
    return 0.5

def form(completions, **columns):
    return [1.0 for _ in completions]

if __name__ == "__main__":
    run = bapo.train({config}, reward=[score, {"function": form, "weight": 3.0}])
    print(run.path, flush=True)
    for row in run:
        print(row["step"], flush=True)
"""


def test_ctrl_c_in_a_script_stops_its_run(tmp_path: Path) -> None:
    config = SCRIPTED | {
        "run": {"num_steps": 10_000, "root": str(tmp_path), "name": "mine"},
        "preset": "grpo",
        "model": {"path": str(REPOSITORY / "models/countdown-tiny"), "dtype": "float32"},
        "task": {"name": "countdown", "check_gold": False},
    }
    config["rollout"] = {"engine": "scripted", "num_workers": 1, "max_prompt_tokens": 32, "max_response_tokens": 16}
    (tmp_path / "train.py").write_text(SCRIPT.replace("{config}", repr(config)))
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "train.py")],
        cwd=REPOSITORY, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    run = RunDirectory(tmp_path / "mine")
    try:
        assert process.stdout is not None
        said = list(takewhile(lambda line: line != str(run.path), map(str.strip, process.stdout)))
        assert "warning: gold answers: 8 of 8 get a reward below 1" in said
        assert {line.partition(" ")[0] for line in said} == {"warning:"}
        assert process.stdout.readline().strip() == "1"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        output, _ = process.communicate(timeout=WAIT_S)
    finally:
        if process.poll() is None:
            process.kill()
    assert "KeyboardInterrupt" in output
    # Where the signal meets the script's own line, the run is stopped by the end of the script instead of by its wait.
    wait_until(lambda: run.read_run()["status"] == "interrupted")
    assert not run.is_under_way
    # From another process it is read, not stopped.
    found = bapo.Run(run.path)
    assert (found.status, found.is_running, found.wait()) == ("interrupted", False, "interrupted")
    first = next(iter(found))
    assert (first["step"], first["reward_mean"]) == (1, 0.875)
    assert first["reward_parts"] == {"score": 0.5, "form": 1.0}


@pytest.mark.parametrize(
    ("config", "sections", "words"),
    [
        ("grpo", {}, "does not set a model"),
        ("grpo", {"learner": {"lrr": 1.0}}, "does not set a model"),
        ({"model": {"path": "m"}, "task": {"name": "countdown"}}, {"learner": {"lrr": 1.0}}, "bapo.train: learner.lrr"),
        ({"model": {"path": "nowhere"}, "task": {"name": "countdown"}}, {}, "nowhere"),
    ],
)
def test_a_wrong_config_is_refused_by_train_itself(
    config: object, sections: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        bapo.train(config, **sections)
    assert words in str(refused.value)
    assert [path for path in tmp_path.glob("outputs/*") if path.is_dir()] == []
