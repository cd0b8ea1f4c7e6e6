"""With workers that sample ahead, the learner trains while its last weights are written and sent."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from bapo.core.errors import UnavailableError
from bapo.core.types import WeightUpdate
from learner import publish_weights
from learner.checkpoint import open_checkpoint
from tests.support.learner import FakeBuffer, FakeFleet, learner_config, make_test_learner, random_batch

LIMIT_S = 20.0


def run(model_path: Path, path: Path, fleet: FakeFleet, buffer: FakeBuffer, *, ahead: int = 1) -> None:
    config = learner_config(
        model_path,
        cadence={"weight_sync_interval": 2, "reevaluation_interval": 2, "max_steps_ahead": ahead},
        checkpoint={"every": 3},
    )
    make_test_learner(config, path, buffer=buffer, fleet=fleet).run(1)


def test_a_step_trains_while_its_weights_are_written_and_the_file_is_that_of_its_start(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of version 2 is written after step 2 has changed the weights."""
    plain = FakeFleet()
    run(model_path, tmp_path / "waiting", plain, FakeBuffer(lambda step: random_batch(step=step)), ahead=0)
    trained = threading.Event()
    write = publish_weights.write_weights

    def write_late(tensors: Any, path: Path, metadata: Any) -> None:
        if path.name == "version-000002.safetensors":
            assert trained.wait(LIMIT_S)
        write(tensors, path, metadata)

    def batch_of(step: int) -> Any:
        if step == 3:
            trained.set()
        return random_batch(step=step)

    monkeypatch.setattr(publish_weights, "write_weights", write_late)
    fleet, buffer = FakeFleet(), FakeBuffer(batch_of)
    fleet.on_update = lambda update: buffer.told.append(("weights", update.version))
    run(model_path, tmp_path / "ahead", fleet, buffer)
    assert [(update.version, update.digest) for update in fleet.updates] == [
        (update.version, update.digest) for update in plain.updates
    ]
    order = [entry for entry in buffer.told if entry[0] in {"weights", "commit"}]
    # Version 1 has nothing to overlap with; the checkpoint of step 3 waits for version 2.
    assert order[:3] == [("weights", 1), ("commit", (1, 0)), ("commit", (2, 0))]
    assert order[3:5] == [("weights", 2), ("commit", (3, 3))]
    assert order[-1] == ("weights", 5), "a run ends when the workers have its last weights"


def test_a_checkpoint_holds_the_weights_that_the_workers_have(model_path: Path, tmp_path: Path) -> None:
    fleet = FakeFleet()
    run(model_path, tmp_path, fleet, FakeBuffer(lambda step: random_batch(step=step)))
    checkpoint = open_checkpoint(tmp_path / "checkpoints", 3)
    (version_2,) = (update for update in fleet.updates if update.version == 2)
    assert checkpoint.state.alpha_version == 2
    assert checkpoint.state.canary == version_2.canary
    assert publish_weights.digest_of(checkpoint.alpha_path) == version_2.digest


def test_an_update_that_fails_in_the_background_ends_the_run_at_the_next_step(model_path: Path, tmp_path: Path) -> None:
    fleet = FakeFleet()
    failed = threading.Event()

    def fail(update: WeightUpdate) -> None:
        if update.version == 2:
            failed.set()
            raise UnavailableError("the rollout server did not respond")

    def batch_of(step: int) -> Any:
        if step == 2:
            assert failed.wait(LIMIT_S)
        return random_batch(step=step)

    fleet.on_update, buffer = fail, FakeBuffer(batch_of)
    with pytest.raises(UnavailableError):
        run(model_path, tmp_path, fleet, buffer)
    assert ("batch", 4) not in buffer.told
