"""`bapo study` as a user runs it: real launchers and a scripted engine; killed in the middle, interrupted, resumed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from bapo.runtime.run_directory.layout import RunDirectory
from studies.state import Results
from tests.support.launch import (
    START_S,
    Start,
    alive,
    family,
)
from tests.support.tiny_model import write_tiny_model
from tests.support.wait import wait_until


def write_study(tmp_path: Path) -> Path:
    """Two methods, one seed, three steps."""
    write_tiny_model(tmp_path / "model")
    common = {
        "run": {"num_steps": 3},
        "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
        "task": {"name": "countdown", "options": {"num_train": 64, "num_held_out": 16}},
        "algorithm": {"batch_size": 8},
        "cadence": {"max_steps_ahead": 0, "wait_for_reevaluation": False},
        "rollout": {"engine": "scripted", "num_workers": 1, "max_prompt_tokens": 32, "max_response_tokens": 16},
        "learner": {"minibatch_size": 4, "microbatch_tokens": 4096},
        "checkpoint": {"every": 1},
        "evaluation": {"every": 0, "num_prompts_final": 8, "num_samples": 2},
    }
    ours = {"preset": "bapo", "settings": {"cadence": {"weight_sync_interval": 1, "reevaluation_interval": 1}}}
    study = {
        "study": {"name": "tiny", "root": str(tmp_path / "outputs"), "seeds": [1], "parallel": 1},
        "common": common,
        "methods": {"plain": {"preset": "grpo"}, "ours": ours},
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


ALL = {"plain-s1", "ours-s1"}


def test_a_study_that_is_killed_in_the_middle_is_resumed_and_makes_nothing_twice(
    started: Start, tmp_path: Path
) -> None:
    path = write_study(tmp_path)
    process = started(["study", str(path)])
    wait_until(lambda: "plain-s1" in rows_of(tmp_path), timeout_s=START_S, what="the first run is finished")
    wait_until(lambda: num_steps_of(tmp_path, "ours-s1") >= 1, timeout_s=300, what="the second run steps")
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
    assert "ours-s1: resumed from its checkpoint after step" in output or "ours-s1: restarted at step 1" in output
    assert "all 2 runs are finished" in output
    assert (folder_of(tmp_path) / "runs" / "plain-s1" / "metrics.jsonl").read_bytes() == first
    rows = rows_of(tmp_path)
    assert set(rows) == ALL
    assert {row["status"] for row in rows.values()} == {"finished"}
    assert {name: num_steps_of(tmp_path, name) for name in ALL} == dict.fromkeys(ALL, 3)
    # Both methods saw the same prompts in the same order.
    plain, ours = (
        [sorted(f.prompt_id for f in results if f.purpose == "fresh" and f.reason != "reused") for _, results in
         RunDirectory(folder_of(tmp_path) / "runs" / f"{method}-s1").read_groups()]
        for method in ("plain", "ours")
    )  # fmt: skip
    assert plain == ours

    third = started(["study", str(path)])
    output, _ = third.communicate(timeout=START_S)
    assert (third.returncode, "all 2 runs are finished" in output) == (0, True), output
