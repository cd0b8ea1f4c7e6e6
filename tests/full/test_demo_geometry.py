"""demo-geometry.toml in small: the shipped vision-language model, real vLLM on Ray, every other part real too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.launch import FREE_PORTS, REPOSITORY, alive, family, kill_family, start
from tests.support.wait import wait_until

if importlib.util.find_spec("torchvision") is None:
    pytest.skip("pip install --no-deps -r requirements/vision.txt", allow_module_level=True)

SMALL = [
    "--run.name", "run", "--run.num_steps", "3", "--algorithm.batch_size", "8", "--learner.minibatch_size", "4",
    "--evaluation.num_prompts_final", "8", "--evaluation.every", "0", "--checkpoint.every", "3",
]  # fmt: skip
WAIT_S = 240.0


def test_three_steps_train_on_what_the_model_sees(tmp_path: Path) -> None:
    config = str(REPOSITORY / "deploy/configs/demo-geometry.toml")
    process = start(["train", config, "--run.root", str(tmp_path), *SMALL, *FREE_PORTS])
    run = RunDirectory(tmp_path / "run")
    try:
        wait_until(lambda: bool(run.read_metrics()) or process.poll() is not None, timeout_s=WAIT_S, what="step 1")
        members = family(process) if process.poll() is None else []
        output, _ = process.communicate(timeout=WAIT_S)
    finally:
        kill_family(process)
    assert process.returncode == 0, output
    assert alive(members) == []

    rows = run.read_metrics()
    assert [row["step"] for row in rows] == [1, 2, 3]
    # The engine's log-probs are the learner's: both see the same pixels, normalized once.
    assert rows[0]["staleness_x1_max"] == 0
    assert rows[0]["tv_x1"] < 1e-4
    assert {(row["split"], row["version"]) for row in run.read_evaluations()} == {
        ("geometry", 1), ("geometry3", 1), ("geometry", 4), ("geometry3", 4),
    }  # fmt: skip
