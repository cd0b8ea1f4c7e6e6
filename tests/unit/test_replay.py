"""A step of the learner again, from a checkpoint and kept batches: equal to the last bit, or told what differs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bapo.config.tree import Config
from bapo.core.codec import pack_batch
from bapo.core.errors import DivergenceError
from bapo.core.types import Batch
from bapo.runtime.process import Flags
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.replayable import plan_replay, plan_replay_of
from learner.loop import Learner
from learner.replay import Replay, as_json, as_text, replay
from tests.support.learner import FakeBuffer, FakeFleet, learner_config, make_test_learner, random_batch


def config_of(model_path: Path, *, num_steps: int = 3, every: int = 2, keep: bool = True) -> Config:
    """Warm-up, momentum, remembered anchors and a reference: all that the state of a step is made of."""
    return learner_config(
        model_path,
        run={"num_steps": num_steps},
        loss={"ratio_mode": "official", "kl_ref": "reference", "kl_coef": 0.01},
        learner={"warmup_steps": 5, "minibatch_size": 2},
        checkpoint={"every": every, "keep_last": 2, "keep_batches": keep},
    )


def batch_of(step: int) -> Batch:
    return random_batch(step=step, num_groups=4)


def train(config: Config, path: Path) -> Learner:
    """A whole run with a real run directory."""
    learner = make_test_learner(config, path, buffer=FakeBuffer(batch_of), fleet=FakeFleet())
    learner.records = RunDirectory(path)
    learner.run(1)
    return learner


def replayed(config: Config, path: Path, step: int) -> Replay:
    flags = Flags(config=config, run=RunDirectory(path), extra=argparse.Namespace())
    return replay(flags, plan_replay(flags.run, step))


def files_of(path: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in path.rglob("*")}


@pytest.mark.parametrize("every", [2, 3])
def test_the_third_step_again_gives_its_weights_and_its_row_bit_by_bit(
    every: int, model_path: Path, tmp_path: Path
) -> None:
    config = config_of(model_path, every=every)
    train(config, tmp_path)
    before = files_of(tmp_path)
    found = replayed(config, tmp_path, 3)
    assert (found.start, [step.step for step in found.steps]) == ((2, [3]) if every == 2 else (0, [1, 2, 3]))
    assert all(step.differences == [] and len(step.compared) > 20 for step in found.steps)
    assert (found.weights_differ_by, found.exact) == (0.0, True)
    assert files_of(tmp_path) == before  # a replay changes nothing in the run
    text = as_text(found, config.learner)
    assert "weights after it are bitwise equal to the checkpoint of step 3" in text
    assert "values are equal to metrics.jsonl" in text


def test_what_comes_out_otherwise_is_named(model_path: Path, tmp_path: Path) -> None:
    config = config_of(model_path)
    train(config, tmp_path)
    rows = RunDirectory(tmp_path).read_metrics()
    rows[2]["loss"] += 1.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Another batch than the one that step 3 trained: the weights must come out otherwise too.
    RunDirectory(tmp_path).write_batch(3, pack_batch(random_batch(step=3, num_groups=4, seed=5)))
    found = replayed(config, tmp_path, 3)
    assert "loss" in {difference.name for difference in found.steps[-1].differences}
    assert found.weights_differ_by is not None
    assert found.weights_differ_by > 0
    assert not json.loads(as_json(found))["exact"]
    assert "different: loss" in as_text(found, config.learner)


def test_a_run_keeps_the_batches_behind_its_oldest_checkpoint_and_no_others(model_path: Path, tmp_path: Path) -> None:
    train(config_of(model_path, num_steps=7), tmp_path / "kept")
    run = RunDirectory(tmp_path / "kept")
    assert (run.checkpoint_steps(), run.batch_steps()) == ([6, 7], [7])
    train(config_of(model_path, num_steps=5, every=4), tmp_path / "young")
    assert RunDirectory(tmp_path / "young").batch_steps() == [5]
    train(config_of(model_path, keep=False), tmp_path / "none")
    assert RunDirectory(tmp_path / "none").batch_steps() == []


def test_a_step_that_diverged_diverges_again_at_the_same_place(model_path: Path, tmp_path: Path) -> None:
    config = config_of(model_path)
    train(config, tmp_path)
    wild = config.model_copy(update={"learner": config.learner.model_copy(update={"lr": 1e30, "warmup_steps": 0})})
    run = RunDirectory(tmp_path)
    run.diverged_path(4).parent.mkdir()
    run.diverged_path(4).write_bytes(pack_batch(batch_of(4)))
    flags = Flags(config=wild, run=run, extra=argparse.Namespace())
    with pytest.raises(DivergenceError) as refused:
        replay(flags, plan_replay_of(run, run.diverged_path(4)))
    assert "in the replay from step 3: step 4, mini-batch 2 of 2" in str(refused.value)
    assert str(run.diverged_path(4)) in str(refused.value)
