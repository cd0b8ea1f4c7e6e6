"""A fleet that begins again takes the weights that the run has, and none of an earlier attempt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bapo.core.errors import UnavailableError
from bapo.core.types import Canary, Progress, WeightUpdate
from rollout_server.weights.newest import recall, remember


class Buffer:
    def __init__(self, version: int, *, is_up: bool = True) -> None:
        self._version, self._is_up = version, is_up

    def progress(self) -> Progress:
        if not self._is_up:
            raise UnavailableError("away")
        return Progress(step=self._version, policy_version=self._version)


@pytest.fixture
def update(tmp_path: Path) -> WeightUpdate:
    path = tmp_path / "version-000004.safetensors"
    path.write_bytes(b"12345678")
    canary = Canary(token_ids=(1, 2), logprobs=(-0.5, -0.25), tolerance=0.5)
    return WeightUpdate(version=4, path=str(path), digest="ab" * 32, num_bytes=8, canary=canary)


def test_what_was_remembered_is_recalled_whole(update: WeightUpdate, tmp_path: Path) -> None:
    remember(tmp_path, update)
    assert recall(tmp_path, Buffer(4)) == update


def test_before_the_first_update_there_is_nothing_to_recall(tmp_path: Path) -> None:
    assert recall(tmp_path, Buffer(0)) is None


def test_weights_of_a_run_that_began_again_are_not_taken(update: WeightUpdate, tmp_path: Path) -> None:
    remember(tmp_path, update)
    assert recall(tmp_path, Buffer(0)) is None


def test_weights_that_are_gone_or_cut_off_are_not_taken(update: WeightUpdate, tmp_path: Path) -> None:
    remember(tmp_path, update)
    Path(update.path).write_bytes(b"1234567")
    assert recall(tmp_path, Buffer(4)) is None
    Path(update.path).unlink()
    assert recall(tmp_path, Buffer(4)) is None


def test_a_damaged_note_only_costs_time_and_a_silent_buffer_is_said(update: WeightUpdate, tmp_path: Path) -> None:
    remember(tmp_path, update)
    with pytest.raises(UnavailableError):
        recall(tmp_path, Buffer(4, is_up=False))
    (tmp_path / "published.json").write_text(json.dumps({"version": 4})[:-2])
    assert recall(tmp_path, Buffer(4)) is None
