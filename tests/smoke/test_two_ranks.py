"""Two ranks over gloo with FSDP2 against one rank: the same losses, weights and checkpoints by the same code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.fsdp_rank import METER_FILE
from tests.support.shards import stored_tensors
from tests.support.spawn_ranks import assert_same_numbers, run_ranks


@pytest.fixture(scope="module")
def one_rank(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    run = tmp_path_factory.mktemp("one")
    return run, run_ranks(model_path, run, 1, 1, 4)[0]


def assert_same_checkpoints(one: Path, other: Path, step: int, atol: float) -> None:
    name = f"checkpoints/step-{step:06d}"
    assert_same_files(one / name / "anchors.safetensors", other / name / "anchors.safetensors", atol)
    first, second = stored_tensors(one / name), stored_tensors(other / name)
    assert first.keys() == second.keys()
    for key, values in first.items():
        np.testing.assert_allclose(values, second[key], rtol=0, atol=atol, err_msg=key)


def assert_same_files(one: Path, other: Path, atol: float) -> None:
    first, second = load_file(one), load_file(other)
    assert first.keys() == second.keys()
    for name, values in first.items():
        np.testing.assert_allclose(values, second[name], rtol=0, atol=atol, err_msg=name)


def test_two_ranks_give_the_losses_weights_and_checkpoints_of_one(
    model_path: Path, one_rank: tuple[Path, list[list[float]]], tmp_path: Path
) -> None:
    run, want = one_rank
    first, second = run_ranks(model_path, tmp_path, 2, 1, 4)
    # Steps 1, 3 and 4 have three mini-batches, step 2 one.
    assert len(want) == 10
    assert first == second, "every rank reports the numbers of all"
    assert_same_numbers(first, want)
    # Half of one update of the learning rate 1e-3: where a gradient is near zero, rounding decides AdamW's step.
    assert_same_files(
        tmp_path / "weights" / "version-000005.safetensors", run / "weights" / "version-000005.safetensors", 5e-4
    )
    assert_same_checkpoints(tmp_path, run, 2, atol=5e-4)
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
