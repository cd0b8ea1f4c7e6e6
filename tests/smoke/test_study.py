"""`bapo study` as a user runs it: real launchers and a scripted engine; killed in the middle, interrupted, resumed."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w

from bapo.records import RunDirectory
from bapo.study.results import Results
from tests.launching import alive, family, kill_family, start
from tests.patience import wait_until
from tests.tiny_model import write_tiny_model

START_S = 120.0
Start = Callable[[Sequence[str]], subprocess.Popen[str]]


@pytest.fixture
def started() -> Iterator[Start]:
    """Starts commands and ends what a failed test left of them."""
    processes: list[subprocess.Popen[str]] = []

    def begin(arguments: Sequence[str]) -> subprocess.Popen[str]:
        processes.append(start(arguments))
        return processes[-1]

    yield begin
    for process in processes:
        kill_family(process)


def write_study(tmp_path: Path, *, num_steps: int, parallel: int, ours: dict[str, Any] | None = None) -> Path:
    model = tmp_path / "model"
    if not model.exists():
        write_tiny_model(model)
    common = {
        "run": {"num_steps": num_steps},
        "model": {"path": str(model), "dtype": "float32"},
        "task": {"name": "countdown", "options": {"num_train": 64, "num_held_out": 16}},
        "algorithm": {"batch_size": 8},
        "cadence": {"slack": 0, "wait_for_reevaluation": False},
        "rollout": {"engine": "scripted", "num_workers": 1, "max_prompt_tokens": 32, "max_response_tokens": 16},
        "learner": {"minibatch_size": 4, "microbatch_tokens": 4096},
        "checkpoint": {"every": 1},
        "evaluation": {"every": 0, "num_prompts_final": 8, "num_samples": 2},
    }
    study = {
        "study": {"name": "tiny", "root": str(tmp_path / "outputs"), "seeds": [1, 2], "parallel": parallel},
        "common": common,
        "methods": {
            "plain": {"preset": "grpo"},
            "ours": {"preset": "bapo", "settings": {"cadence": {"v": 1, "m": 1}, **(ours or {})}},
        },
    }
    path = tmp_path / "STUDY.toml"
    path.write_text(tomli_w.dumps(study))
    return path


def folder_of(tmp_path: Path) -> Path:
    return tmp_path / "outputs" / "tiny"


def rows_of(tmp_path: Path) -> dict[str, dict[str, Any]]:
    return {row["run"]: row for row in Results(folder_of(tmp_path)).read()}


def num_steps_of(tmp_path: Path, name: str) -> int:
    return len(RunDirectory(folder_of(tmp_path) / "runs" / name).read_metrics())


ALL = {"plain-s1", "ours-s1", "plain-s2", "ours-s2"}


def test_a_study_that_is_killed_in_the_middle_is_resumed_and_makes_nothing_twice(
    started: Start, tmp_path: Path
) -> None:
    path = write_study(tmp_path, num_steps=3, parallel=1)
    process = started(["study", str(path)])
    wait_until(lambda: "plain-s1" in rows_of(tmp_path), timeout_s=START_S, what="the first run is finished")
    wait_until(lambda: num_steps_of(tmp_path, "ours-s1") >= 1, timeout_s=START_S, what="the second run steps")
    members = family(process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    # The launcher of the run that went on ends it, though nobody is left to ask it to.
    _, left = psutil.wait_procs(members, timeout=30)
    assert alive(left) == []
    first = (folder_of(tmp_path) / "runs" / "plain-s1" / "metrics.jsonl").read_bytes()

    again = started(["study", str(path)])
    output, _ = again.communicate(timeout=4 * START_S)
    assert again.returncode == 0, output
    assert "ours-s1: continued from its checkpoint after step" in output or "ours-s1: started anew" in output
    assert "all 4 runs are finished" in output
    assert (folder_of(tmp_path) / "runs" / "plain-s1" / "metrics.jsonl").read_bytes() == first
    rows = rows_of(tmp_path)
    assert set(rows) == ALL
    assert {row["status"] for row in rows.values()} == {"finished"}
    assert {name: num_steps_of(tmp_path, name) for name in ALL} == dict.fromkeys(ALL, 3)
    # Both methods saw the same prompts in the same order.
    for seed in (1, 2):
        plain, ours = (
            [sorted(f.prompt_id for f in fates if f.purpose == "fresh" and f.reason != "reused") for _, fates in
             RunDirectory(folder_of(tmp_path) / "runs" / f"{method}-s{seed}").read_groups()]
            for method in ("plain", "ours")
        )  # fmt: skip
        assert plain == ours

    third = started(["study", str(path)])
    output, _ = third.communicate(timeout=START_S)
    assert (third.returncode, "all 4 runs are finished" in output) == (0, True), output


def test_ctrl_c_ends_the_runs_and_says_how_to_go_on(started: Start, tmp_path: Path) -> None:
    path = write_study(tmp_path, num_steps=100_000, parallel=2)
    process = started(["study", str(path)])
    for name in ("plain-s1", "ours-s1"):
        wait_until(lambda name=name: num_steps_of(tmp_path, name) >= 2, timeout_s=START_S, what=f"{name} steps")
    members = family(process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "ended by the user: " in output
    assert "not started: plain-s2, ours-s2" in output
    assert f"go on with the same command; finished runs are kept: bapo study {path}" in output
    assert alive(members) == []
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"interrupted"}


def test_a_run_that_fails_does_not_stop_the_others_and_is_named_with_its_reason(started: Start, tmp_path: Path) -> None:
    # A worker that needs longer than it may fails its run, and no other.
    broken = {"rollout": {"start_timeout_s": 0.01}}
    path = write_study(tmp_path, num_steps=2, parallel=2, ours=broken)
    process = started(["study", str(path)])
    output, _ = process.communicate(timeout=4 * START_S)
    assert process.returncode == 1, output
    assert "2 of 4 runs failed; their output is in" in output
    assert "ours-s1 failed with exit code " in output
    rows = rows_of(tmp_path)
    assert {name: row["status"] for name, row in rows.items()} == {
        "plain-s1": "finished", "plain-s2": "finished", "ours-s1": "failed", "ours-s2": "failed",
    }  # fmt: skip
    assert all(rows[name]["reason"] for name in ("ours-s1", "ours-s2"))
    assert json.loads((folder_of(tmp_path) / "runs" / "ours-s1" / "run.json").read_text())["status"] == "failed"
