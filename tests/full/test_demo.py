"""The demos in small: shipped models, real vLLM on Ray, every other part real too, three steps."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.launch import FREE_PORTS, REPOSITORY, alive, family, kill_family, start
from tests.support.wait import wait_until

SMALL = [
    "--run.name", "run", "--run.num_steps", "3", "--algorithm.batch_size", "8", "--learner.minibatch_size", "4",
    "--evaluation.num_prompts_final", "8", "--evaluation.every", "0", "--checkpoint.every", "3",
]  # fmt: skip
WAIT_S = 240.0
without_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="pip install --no-deps -r requirements/vision.txt"
)


def three_steps(folder: Path, config: str, splits: tuple[str, ...]) -> RunDirectory:
    """Train with a shipped configuration, and check what every run promises. Returns: the run."""
    process = start(["train", str(REPOSITORY / config), "--run.root", str(folder), *SMALL, *FREE_PORTS])
    run = RunDirectory(folder / "run")
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
    # Step 1 trains what theta_1 itself sampled: the engine's log-probs and the learner's are the same.
    assert rows[0]["staleness_x1_max"] == 0
    assert rows[0]["tv_x1"] < 1e-4
    measured = {(row["split"], row["version"]) for row in run.read_evaluations()}
    assert measured == {(split, version) for split in splits for version in (1, 4)}
    return run


def test_three_steps_of_the_demo_train_the_shipped_model(tmp_path: Path) -> None:
    splits = ("chain", "chain-long")
    run = three_steps(tmp_path, "deploy/configs/demo.toml", (*splits, *(f"{split}@0.3" for split in splits)))
    exported = run.checkpoint_dir(3) / "hf"
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert model.num_parameters() == 646_784
    export = [sys.executable, "-m", "bapo.cli", "export", str(run.path), "--out", str(tmp_path / "mine")]
    subprocess.run(export, check=True, cwd=REPOSITORY)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))


def test_three_steps_of_the_mathematics_demo_train_its_model(tmp_path: Path) -> None:
    three_steps(tmp_path, "deploy/configs/demo-mathematics.toml", ("words", "latex", "words@0.3", "latex@0.3"))


@without_torchvision
def test_three_steps_train_on_what_the_model_sees(tmp_path: Path) -> None:
    """Engine and learner see the same pixels, normalized once."""
    splits = ("geometry", "geometry-blank", "geometry-swapped")
    three_steps(tmp_path, "deploy/configs/demo-geometry.toml", (*splits, *(f"{split}@0.3" for split in splits)))
