"""`bapo study` as a user runs it: real launchers and a scripted engine; killed in the middle, interrupted, resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tomli_w

from bapo.analysis.study.state import Results
from tests.support.launch import START_S, Start
from tests.support.tiny_model import write_tiny_model


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
