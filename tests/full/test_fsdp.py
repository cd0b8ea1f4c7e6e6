"""Two ranks over gloo with FSDP2 against one rank: the same losses, weights and checkpoints by the same code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from bapo.rank_environment import free_port
from tests.fsdp_rank import METER_FILE
from tests.methods_rank import METHODS
from tests.tiny_model import write_tiny_model

TIMEOUT_S = 600
"""Of one start of the ranks: on a loaded machine, gloo waits for the slower one at every layer."""


def run_ranks(model: Path, run: Path, num_ranks: int, first: int, last: int) -> list[list[list[float]]]:
    """Losses and gradient norms of every mini-batch, per rank."""
    return spawn_ranks("fsdp_rank", [str(model), str(run), str(num_ranks), str(first), str(last)], num_ranks)


def spawn_ranks(module: str, arguments: list[str], num_ranks: int) -> list[Any]:
    """What each rank printed as its last line, as JSON."""
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.integration.{module}", *arguments],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def one_rank(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    run = tmp_path_factory.mktemp("one")
    return run, run_ranks(model, run, 1, 1, 4)[0]


def assert_same_files(one: Path, other: Path, atol: float) -> None:
    first, second = load_file(one), load_file(other)
    assert first.keys() == second.keys()
    for name, values in first.items():
        np.testing.assert_allclose(values, second[name], rtol=0, atol=atol, err_msg=name)


def test_two_ranks_give_the_losses_weights_and_checkpoints_of_one(
    model: Path, one_rank: tuple[Path, list[list[float]]], tmp_path: Path
) -> None:
    run, want = one_rank
    first, second = run_ranks(model, tmp_path, 2, 1, 4)
    # Steps 1, 3 and 4 have three mini-batches, step 2 one.
    assert len(want) == 10
    assert first == second, "every rank reports the numbers of all"
    np.testing.assert_allclose(first, want, rtol=1e-5, atol=1e-5)
    assert_same_files(
        tmp_path / "weights" / "version-000005.safetensors", run / "weights" / "version-000005.safetensors", 1e-4
    )
    for name in ("hf/model.safetensors", "optimizer.safetensors", "anchors.safetensors"):
        assert_same_files(
            tmp_path / "checkpoints/step-000002" / name, run / "checkpoints/step-000002" / name, atol=1e-4
        )
    assert_same_meter(tmp_path / METER_FILE, run / METER_FILE)


def assert_same_meter(one: Path, other: Path) -> None:
    """The same subsets and ages, and numbers that differ by no more than the weights do."""
    first, second = json.loads(one.read_text()), json.loads(other.read_text())
    assert len(first) == 4
    for row, same in zip(first, second, strict=True):
        assert row["divergences"]
        for kind in ("divergences", "bounds"):
            for cell, again in zip(row[kind], same[kind], strict=True):
                assert words_of(cell) == words_of(again)
                assert numbers_of(cell) == pytest.approx(numbers_of(again), rel=1e-3, abs=1e-3)


def words_of(cell: dict[str, Any]) -> dict[str, Any]:
    """Subset, age, counts, yes and no."""
    return {name: value for name, value in cell.items() if not isinstance(value, float)}


def numbers_of(cell: dict[str, Any]) -> dict[str, float]:
    """What was estimated."""
    return {name: value for name, value in cell.items() if isinstance(value, float)}


def test_a_checkpoint_of_two_ranks_is_resumed_by_two_ranks_and_by_one(
    model: Path, one_rank: tuple[Path, list[list[float]]], tmp_path: Path
) -> None:
    _, want = one_rank
    run_ranks(model, tmp_path, 2, 1, 2)
    again = run_ranks(model, tmp_path, 2, 3, 4)[0]
    np.testing.assert_allclose(again, want[4:], rtol=1e-5, atol=1e-5)
    for name in ("step-000004",):
        for path in sorted((tmp_path / "checkpoints" / name).rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
    alone = run_ranks(model, tmp_path, 1, 3, 4)[0]
    np.testing.assert_allclose(alone, want[4:], rtol=1e-5, atol=1e-5)


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_two_ranks_give_the_losses_of_one_for_every_method(model: Path, tmp_path: Path) -> None:
    [alone] = spawn_ranks("methods_rank", [str(model), str(tmp_path), "1"], 1)
    first, second = spawn_ranks("methods_rank", [str(model), str(tmp_path), "2"], 2)
    assert alone.keys() == METHODS.keys()
    assert len({tuple(numbers) for numbers in alone.values()}) == len(METHODS), "a choice that changed nothing"
    assert first == second, "every rank reports the numbers of all"
    for method, numbers in alone.items():
        np.testing.assert_allclose(first[method], numbers, rtol=1e-3, atol=1e-5, err_msg=method)
        assert max(map(abs, numbers)) > 1e-3, method
