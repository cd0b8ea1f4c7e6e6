"""`bapo sft` as a process: a model folder at its end, and the same one after a resume."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bapo.config.load import load_resolved
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.launch import REPOSITORY


def bapo(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bapo.cli", *words]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": "a+b", "completion": f"{i}"} for i in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start(data: Path, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return bapo(
        "sft", str(data), "--sft.epochs", "2", "--model.path", "models/lookup-tiny", "--model.dtype", "float32",
        "--learner.device", "cpu", "--algorithm.batch_size", "4", "--learner.lr", "1e-3", "--checkpoint.every", "2",
        "--run.root", str(folder), *more,
    )  # fmt: skip


def test_it_makes_a_model_folder_and_a_resumed_run_makes_the_same(tmp_path: Path, data: Path) -> None:
    done = start(data, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "10 conversations, 6 steps of 4" in done.stdout
    run = RunDirectory(tmp_path / "sums-sft-001")
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[0]["lr"] == pytest.approx(1e-3), "the warm-up is that of a run of its length"
    assert rows[-1]["loss"] < rows[0]["loss"]
    folder = run.checkpoint_dir(6) / "hf"
    assert f"bapo train CONFIG --model.path {folder}" in done.stderr
    weights = load_file(folder / "model.safetensors")
    shutil.rmtree(run.checkpoint_dir(6))
    assert bapo("sft", "--resume", str(run.path)).returncode == 0
    again = load_file(folder / "model.safetensors")
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_mistakes_are_said_in_one_line(tmp_path: Path, data: Path) -> None:
    for words, message in (
        ((str(tmp_path / "none.jsonl"),), "cannot read"),
        ((str(data), "--model.path", "no/such/model"), "no/such/model"),
        ((str(data), "--sft.epochs", "0"), "sft.epochs"),
        ((str(data), "--run.num_steps", "9"), "bapo sft sets run.num_steps itself: give --epochs"),
    ):
        done = bapo("sft", *words, "--run.root", str(tmp_path))
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_a_file_for_the_run_that_follows_changes_no_likelihood_and_other_data_are_refused(
    tmp_path: Path, data: Path
) -> None:
    data, rl = Path(shutil.copy(data, tmp_path)), tmp_path / "rl.toml"
    rl.write_text('preset = "balanced-clip"\nrollout.temperature = 0.6\nlearner.lr = 5e-5\n')  # two passes over a batch
    done = start(data, tmp_path, str(rl))
    assert done.returncode == 0, done.stderr
    assert "learning rate 0.001 (cosine)" in done.stdout
    run = RunDirectory(tmp_path / "sums-sft-001")
    config = load_resolved(run.config_path)
    assert (config.rollout.temperature, config.learner.epochs) == (1, 1)
    assert f"bapo sft --resume {run.path}" in bapo("train", "--resume", str(run.path)).stderr
    data.write_text(data.read_text() + '{"prompt": "a+b", "completion": "c"}\n')
    assert f"{data} has changed since run" in bapo("sft", "--resume", str(run.path)).stderr
