"""A model that was exported from a checkpoint outlives it, and is no checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bapo.config.load import dump_toml, load_config
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.pruning import remove_checkpoint
from learner.checkpoint import CheckpointWriter, complete_steps
from learner.held_out import HeldOut
from studies.runner import tidy
from tests.support.learner import ALONE


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Checkpoints of steps 10, 20, 30 and 40; 10 and 20 were exported while it trained."""
    config = load_config([], ["--checkpoint.keep_last", "1"])
    made = RunDirectory.create(tmp_path / "run", dump_toml(config))
    for step in (10, 20, 30, 40):
        (made.checkpoint_dir(step) / "learner").mkdir(parents=True)
        for name in ("buffer.bin", "learner/shard.safetensors", "state.json"):
            (made.checkpoint_dir(step) / name).write_text("{}")
    for step, name in ((10, "hf"), (20, "adapter")):
        (made.checkpoint_dir(step) / name).mkdir()
        (made.checkpoint_dir(step) / name / "weights").write_text(f"of step {step}")
    return made


def files_of(run: RunDirectory) -> list[str]:
    folder = run.path / "checkpoints"
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


LEFT = [
    "step-000010/hf/weights", "step-000020/adapter/weights", "step-000040/buffer.bin",
    "step-000040/learner/shard.safetensors", "step-000040/state.json",
]  # fmt: skip


def check(run: RunDirectory) -> None:
    assert files_of(run) == LEFT
    assert sorted(path.name for path in (run.path / "checkpoints").iterdir()) == [
        "step-000010", "step-000020", "step-000040",
    ]  # fmt: skip
    assert (run.checkpoint_steps(), complete_steps(run.path / "checkpoints")) == ([40], [40])


def test_a_learner_that_removes_old_checkpoints_leaves_their_exported_models(run: RunDirectory) -> None:
    config = load_config([run.config_path], [])
    folder, held_out = run.path / "checkpoints", HeldOut(config, run)
    writer = CheckpointWriter(config=config, folder=folder, world=ALONE, held_out=held_out)
    writer._prune()
    check(run)
    writer._prune()
    check(run)


def test_a_study_that_tidies_a_finished_run_leaves_them_too(run: RunDirectory) -> None:
    tidy(run)
    check(run)


def test_a_kill_at_any_file_leaves_no_checkpoint_and_the_exported_model(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[str] = []

    def killed(source: Path, target: Path) -> None:
        if moved:
            raise KeyboardInterrupt
        moved.append(source.name)
        source.rename(target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            remove_checkpoint(run.checkpoint_dir(10))
    assert moved == ["state.json"]
    assert run.checkpoint_steps() == [20, 30, 40]
    assert (run.checkpoint_dir(10) / "hf" / "weights").read_text() == "of step 10"
    run.truncate_after(40)
    assert not (run.path / "checkpoints" / "step-000010.partial").exists()
