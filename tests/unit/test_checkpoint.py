"""One checkpoint joins everything: a resumed run goes the way of one that was never interrupted."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo.config.tree import Config, ModelConfig
from bapo.core.errors import ConfigError, ContractError, StorageError
from bapo.core.types import Batch, Origin
from bapo.runtime.file_digest import digest_of
from bapo.runtime.model_files import missing_parts
from learner.checkpoint import complete_steps, open_checkpoint
from learner.distributed.shard_files import _RankWriter, weights_of
from learner.distributed.stopping import Stopped
from learner.export import export_model
from learner.loop import Learner
from learner.startup import agreed_checkpoint, newest_checkpoint, republish, resume_buffer
from tests.support.learner import (
    FakeBuffer,
    FakeFleet,
    FakeRecords,
    learner_config,
    make_test_learner,
    random_batch,
    with_groups,
    with_supervised,
)
from tests.support.shards import stored_tensors
from tests.support.tiny_model import reference_logprobs

SHARD = "learner/shard-00001-model-00001-of-00001.safetensors"


def batch_of(step: int) -> Batch:
    """Two groups of this step and one of the step before, as B_high would give it again."""
    fresh = random_batch(step=step, num_groups=2)
    if step == 1:
        return fresh
    old = random_batch(step=step - 1, num_groups=2).entries[0].group
    reused = with_groups(fresh, [old], Origin.X3, step)
    return with_groups(fresh, [entry.group for entry in fresh.entries + reused.entries], Origin.X1, step)


def run_config(model_path: Path, **sections: dict[str, object]) -> Config:
    """Warm-up, momentum, a reference policy and remembered anchors: all that a checkpoint must carry."""
    loss = {"ratio_mode": "official", "kl_ref": "reference", "kl_coef": 0.01}
    values = {
        "run": {"num_steps": 7},
        "loss": loss,
        "cadence": {"weight_sync_interval": 3, "reevaluation_interval": 3},
        "checkpoint": {"every": 2, "keep_last": 2},
        "learner": {"warmup_steps": 5, "minibatch_size": 2},
    }
    return learner_config(model_path, **{**values, **sections})


def train(config: Config, run: Path, buffer: FakeBuffer, fleet: FakeFleet, *, resume: bool = False) -> Learner:
    """What `__main__` does around the loop."""
    checkpoint = newest_checkpoint(run / "checkpoints") if resume else None
    learner = make_test_learner(config, run, buffer=buffer, fleet=fleet, resume=resume)
    if resume:
        resume_buffer(learner.buffer, checkpoint)
    if checkpoint:
        checkpoint.load(learner.updater)
        republish(learner, checkpoint)
    learner.run(checkpoint.state.step + 1 if checkpoint else 1)
    newest = newest_checkpoint(run / "checkpoints")
    assert newest is not None
    export_model(newest, config.model)
    return learner


def save_now(learner: Learner, step: int) -> None:
    learner.save_checkpoint(step)
    learner.finish_checkpoint(wait=True)


def dying_buffer(at_step: int) -> FakeBuffer:
    def make(step: int) -> Batch:
        if step == at_step:
            raise KeyboardInterrupt(f"killed while waiting for batch {step}")
        return batch_of(step)

    return FakeBuffer(make)


def rows_of(learner: Learner) -> list[dict[str, object]]:
    assert isinstance(learner.records, FakeRecords)
    timed = ("time", "tokens_per_s")
    return [
        {key: value for key, value in row.items() if not key.endswith("_s") and key not in timed}
        for row in learner.records.rows
    ]


@pytest.mark.parametrize("killed_at", [1, 6])
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one_bit_by_bit(
    killed_at: int, model_path: Path, tmp_path: Path
) -> None:
    config = run_config(model_path)
    straight = train(config, tmp_path / "straight", FakeBuffer(batch_of), FakeFleet())
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "broken", dying_buffer(killed_at), FakeFleet())
    buffer, fleet = FakeBuffer(batch_of), FakeFleet()
    resumed = train(config, tmp_path / "broken", buffer, fleet, resume=True)

    last = (killed_at - 1) // 2 * 2
    assert buffer.told[0] == ("resume", last)
    assert rows_of(resumed) == rows_of(straight)[last:]
    for a, b in zip(resumed.policy.parameters(), straight.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    # The workers first get what they had at the checkpoint, also when they are ahead of it.
    assert fleet.updates[0].version == max(1, last // 3 * 3)
    assert fleet.rollbacks == [True] + [False] * (len(fleet.rollbacks) - 1)


METHODS: dict[str, dict[str, dict[str, object]]] = {
    "critic": {"loss": {"advantage": "gae", "advantage_options": {"critic_lr": 1e-3}, "ratio_mode": "direct"}},
    "remix": {
        "loss": {
            "name": "geppo_add", "importance_level": "none", "ratio_mode": "decoupled", "kl_ref": "convex",
            "kl_coef": 0.1, "kl_restart_step": 3,
        },
        "learner": {"epochs": 2, "epochs_until": 3, "minibatch_size": 2},
    },
    "supervised": {"algorithm": {"composer": "relift", "options": {"sft_lr": 1e-3}}},
    "lora": {"model": {"lora": {"rank": 2}}},
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("killed_at", [4])
def test_what_single_methods_keep_is_resumed_too(method: str, killed_at: int, model_path: Path, tmp_path: Path) -> None:
    config = run_config(model_path, **METHODS[method])

    def make(step: int) -> Batch:
        return with_supervised(batch_of(step), 0) if method == "supervised" else batch_of(step)

    def killed(step: int) -> Batch:
        if step == killed_at:
            raise KeyboardInterrupt
        return make(step)

    straight = train(config, tmp_path / "straight", FakeBuffer(make), FakeFleet())
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "broken", FakeBuffer(killed), FakeFleet())
    resumed = train(config, tmp_path / "broken", FakeBuffer(make), FakeFleet(), resume=True)
    assert rows_of(resumed) == rows_of(straight)[(killed_at - 1) // 2 * 2 :]
    for name, part in straight.updater.parts.items():
        again = resumed.updater.parts[name].tensors()
        assert all(torch.equal(tensor, again[key]) for key, tensor in part.tensors().items()), name
    for a, b in zip(resumed.policy.parameters(), straight.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    expected = {"critic": "critic", "remix": "reference", "supervised": "supervised", "lora": "model"}[method]
    newest = newest_checkpoint(tmp_path / "straight" / "checkpoints")
    assert newest is not None
    assert newest.shards.part(expected).stored


def test_the_last_checkpoint_has_the_model_its_tokenizer_alpha_and_the_buffer(model_path: Path, tmp_path: Path) -> None:
    learner = train(run_config(model_path), tmp_path, FakeBuffer(batch_of), FakeFleet())
    folder = tmp_path / "checkpoints" / "step-000007"
    assert not (tmp_path / "checkpoints" / "step-000006" / "hf").exists()
    assert {path.name for path in folder.iterdir()} == {
        "learner", "hf", "anchors.safetensors", "alpha.safetensors", "buffer.bin", "state.json",
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(learner.policy.model.named_parameters())[name])
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    assert tokenizer.decode(tokenizer("12,99,7->80:")["input_ids"]) == "12,99,7->80:"
    assert (folder / "buffer.bin").read_bytes() == b"snapshot of the buffer"

    state = json.loads((folder / "state.json").read_text())
    # Step 1 has one mini-batch, each later step has two: 1 + 6 * 2.
    assert (state["step"], state["alpha_version"], state["num_updates"]) == (7, 6, 13)
    model.load_state_dict(
        {name: torch.from_numpy(values) for name, values in load_file(folder / "alpha.safetensors").items()},
        strict=False,
    )
    want = reference_logprobs(model, state["canary"]["token_ids"]).numpy()
    np.testing.assert_allclose(state["canary"]["logprobs"], want, atol=1e-5)


def test_an_export_in_several_files_has_the_bits_of_its_checkpoint_and_is_there_wholly_or_not_at_all(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(run_config(model_path, run={"num_steps": 4}), tmp_path, FakeBuffer(batch_of), FakeFleet())
    earlier, out = open_checkpoint(tmp_path / "checkpoints", 2), tmp_path / "exports" / "mine"
    monkeypatch.setattr("learner.export.FILE_BYTES", 100_000)
    with files_of_at_most(50_000), pytest.raises(StorageError, match="mine"):
        export_model(earlier, ModelConfig(path=str(model_path)), out)
    assert list(out.parent.iterdir()) == []
    export_model(earlier, ModelConfig(path=str(model_path)), out)
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    stored = stored_tensors(earlier.folder, "model")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    assert all(torch.equal(parameter, stored[name]) for name, parameter in model.named_parameters())
    assert missing_parts(out) == []


def test_a_buffer_that_has_lost_its_batches_gets_the_snapshot_back(model_path: Path, tmp_path: Path) -> None:
    config = run_config(model_path)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, dying_buffer(5), FakeFleet())
    buffer = FakeBuffer(batch_of, lost=True)
    train(config, tmp_path, buffer, FakeFleet(), resume=True)
    assert buffer.told[:3] == [("resume", 4), ("restore", b"snapshot of the buffer"), ("resume", 4)]


def test_without_a_checkpoint_a_lost_buffer_cannot_be_resumed(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="start a new run"):
        train(run_config(model_path), tmp_path, FakeBuffer(batch_of, lost=True), FakeFleet(), resume=True)


def test_republished_weights_are_the_file_that_the_workers_had(model_path: Path, tmp_path: Path) -> None:
    config, before, after = run_config(model_path), FakeFleet(), FakeFleet()
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, dying_buffer(5), before)
    shutil.rmtree(tmp_path / "weights")
    train(config, tmp_path, FakeBuffer(batch_of), after, resume=True)
    newest = before.updates[-1]
    assert (newest.version, newest.digest, newest.canary) == (
        after.updates[0].version,
        after.updates[0].digest,
        after.updates[0].canary,
    )


def test_half_a_checkpoint_is_no_checkpoint(model_path: Path, tmp_path: Path) -> None:
    train(run_config(model_path, run={"num_steps": 4}), tmp_path, FakeBuffer(batch_of), FakeFleet())
    newest = tmp_path / "checkpoints" / "step-000004"
    newest.rename(newest.with_suffix(".partial"))
    found = newest_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    assert found.state.step == 2


def test_a_checkpoint_is_on_the_disk_before_anything_is_forgotten(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power failure could take its name, when the older one and the batches behind it are gone already."""
    learner = train(run_config(model_path, run={"num_steps": 4}), tmp_path, FakeBuffer(batch_of), FakeFleet())
    folder = tmp_path / "checkpoints"
    done: list[tuple[str, str]] = []

    def note(name: str, module: Any, describe: Callable[..., Path]) -> None:
        original = getattr(module, name)

        def noting(*args: Any, **options: Any) -> Any:
            done.append((name, str(describe(*args).relative_to(folder))))
            return original(*args, **options)

        monkeypatch.setattr(module, name, noting)

    note("fsync", os, lambda descriptor: Path(os.readlink(f"/proc/self/fd/{descriptor}")))
    note("replace", os, lambda source, target: Path(target))
    note("rmtree", shutil, lambda path, ignore_errors=False: path)
    save_now(learner, 5)
    named = done.index(("replace", "step-000005"))
    assert {path for what, path in done[:named] if what == "fsync"} >= {
        "step-000005.partial", "step-000005.partial/learner", f"step-000005.partial/{SHARD}",
        "step-000005.partial/state.json",
    }  # fmt: skip
    assert done[named + 1] == ("fsync", ".")
    assert ("rmtree", "step-000002.partial") in done[named + 2 :]


def test_a_learner_that_is_killed_while_it_removes_a_checkpoint_leaves_no_half_of_one(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = train(run_config(model_path, run={"num_steps": 4}), tmp_path, FakeBuffer(batch_of), FakeFleet())

    def killed(folder: Path, ignore_errors: bool = False) -> None:
        if (folder / "state.json").exists():
            (folder / "buffer.bin").unlink()
            raise KeyboardInterrupt("killed behind the first file")

    with monkeypatch.context() as patch:
        patch.setattr("learner.checkpoint.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            save_now(learner, 5)
    assert complete_steps(tmp_path / "checkpoints") == [4, 5]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """As on a full disk, a file that grows beyond this is refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_a_storage_error_and_the_older_checkpoint_stays(model_path: Path, tmp_path: Path) -> None:
    config = run_config(model_path, run={"num_steps": 2})
    learner = train(config, tmp_path, FakeBuffer(batch_of), FakeFleet())
    size = (tmp_path / "checkpoints/step-000002" / SHARD).stat().st_size
    digests = {path: digest_of(path) for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}
    # Room for the small files, not for the shards.
    with files_of_at_most(size - 1000), pytest.raises(StorageError, match="step-000003"):
        save_now(learner, 3)
    assert {path: digest_of(path) for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()} == digests
    assert learner.checkpoints.newest == 2
    save_now(learner, 3)
    assert complete_steps(tmp_path / "checkpoints") == [2, 3]


def test_a_damaged_or_foreign_state_is_refused(model_path: Path, tmp_path: Path) -> None:
    train(run_config(model_path, run={"num_steps": 2}), tmp_path, FakeBuffer(batch_of), FakeFleet())
    path = tmp_path / "checkpoints" / "step-000002" / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(ConfigError, match="format 99"):
        newest_checkpoint(tmp_path / "checkpoints")
    del state["canary"]["tolerance"]
    path.write_text(json.dumps(state))
    with pytest.raises(StorageError):
        newest_checkpoint(tmp_path / "checkpoints")


FILES = (SHARD, "anchors.safetensors", "alpha.safetensors", "state.json")


def test_a_checkpoint_with_a_file_that_is_cut_off_is_refused_before_anything_is_changed(
    model_path: Path, tmp_path: Path
) -> None:
    config = run_config(model_path, **METHODS["remix"], run={"num_steps": 4})
    train(config, tmp_path, FakeBuffer(batch_of), FakeFleet())
    folder = tmp_path / "checkpoints" / "step-000004"
    for name in FILES:
        whole = (folder / name).read_bytes()
        for left in (len(whole) // 2, 0):
            (folder / name).write_bytes(whole[:left])
            with pytest.raises(StorageError, match=r"step-000004 .* after step 2$"):
                newest_checkpoint(tmp_path / "checkpoints")
        (folder / name).write_bytes(whole)
    for name in (SHARD, "alpha.safetensors", "buffer.bin"):
        (folder / name).rename(tmp_path / "away")
        with pytest.raises(StorageError, match="step-000004"):
            newest_checkpoint(tmp_path / "checkpoints")
        (tmp_path / "away").rename(folder / name)
    assert newest_checkpoint(tmp_path / "checkpoints") is not None
    shutil.rmtree(tmp_path / "checkpoints" / "step-000002")
    (folder / "state.json").write_bytes(b"")
    with pytest.raises(StorageError):
        newest_checkpoint(tmp_path / "checkpoints")


def test_a_snapshot_of_the_buffer_that_is_cut_off_names_its_checkpoint(model_path: Path, tmp_path: Path) -> None:
    class Refusing(FakeBuffer):
        def restore(self, data: bytes) -> None:
            raise ContractError("snapshot is damaged or truncated: its sha256 does not match")

    config = run_config(model_path, run={"num_steps": 4})
    train(config, tmp_path, FakeBuffer(batch_of), FakeFleet())
    with pytest.raises(StorageError, match=r"buffer\.bin"):
        train(config, tmp_path, Refusing(batch_of, lost=True), FakeFleet(), resume=True)


def test_the_newest_checkpoints_stay_and_the_last_step_always_has_one(model_path: Path, tmp_path: Path) -> None:
    train(run_config(model_path), tmp_path, FakeBuffer(batch_of), FakeFleet())
    assert complete_steps(tmp_path / "checkpoints") == [6, 7]


class Follower:
    """World of a rank that hears this from rank 0."""

    leads, rank = False, 1

    def __init__(self, heard: bytes | None) -> None:
        self._heard = heard

    def share(self, data: bytes | None) -> bytes | None:
        return self._heard


def test_a_rank_that_follows_opens_the_checkpoint_of_rank_0_or_none(model_path: Path, tmp_path: Path) -> None:
    train(run_config(model_path, run={"num_steps": 4}), tmp_path, FakeBuffer(batch_of), FakeFleet())
    folder = tmp_path / "checkpoints"
    found = agreed_checkpoint(folder, Follower(b"2"), ModelConfig())  # type: ignore[arg-type]
    assert found is not None
    assert found.state.step == 2, "although there is one of step 4"
    assert agreed_checkpoint(folder, Follower(b"0"), ModelConfig()) is None  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="step 6"):
        agreed_checkpoint(folder, Follower(b"6"), ModelConfig())  # type: ignore[arg-type]
    with pytest.raises(Stopped):
        agreed_checkpoint(folder, Follower(None), ModelConfig())  # type: ignore[arg-type]


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Shards are on the disk only once the event is set."""
    written = threading.Event()
    finish = _RankWriter.finish

    def waiting(self: _RankWriter, *args: Any, **options: Any) -> None:
        assert written.wait(30.0)
        finish(self, *args, **options)

    monkeypatch.setattr(_RankWriter, "finish", waiting)
    yield written
    written.set()


def learner_in_background(model_path: Path, run: Path, buffer: FakeBuffer) -> Learner:
    config = run_config(model_path, checkpoint={"every": 2, "keep_last": 2, "background": True})
    return make_test_learner(config, run, buffer=buffer, fleet=FakeFleet())


def test_steps_train_while_a_checkpoint_is_written_with_the_weights_of_its_own_step(
    model_path: Path, tmp_path: Path, slow_disk: threading.Event
) -> None:
    buffer = FakeBuffer(batch_of)
    learner = learner_in_background(model_path, tmp_path, buffer)
    learner.run_step(1)
    learner.run_step(2)
    saved = {name: tensor.clone() for name, tensor in weights_of(learner.policy.model).items()}
    learner.run_step(3)
    assert any(not torch.equal(tensor, saved[name]) for name, tensor in weights_of(learner.policy.model).items())
    assert complete_steps(tmp_path / "checkpoints") == []
    assert buffer.told[-1] == ("commit", (3, 0)), "the buffer keeps the batches of a checkpoint that is not complete"
    slow_disk.set()
    learner.run_step(4)
    assert complete_steps(tmp_path / "checkpoints") == [2], "waited for before the next one begins"
    stored = stored_tensors(tmp_path / "checkpoints" / "step-000002", "model")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in saved.items())
    learner.finish_checkpoint(wait=True)
    assert complete_steps(tmp_path / "checkpoints") == [2, 4]


def test_a_full_disk_in_the_background_ends_the_run_at_the_next_step(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    learner = learner_in_background(model_path, tmp_path, FakeBuffer(batch_of))
    learner.run_step(1)
    monkeypatch.setattr(_RankWriter, "finish", refusing)
    learner.run_step(2)
    with pytest.raises(StorageError, match=r"step-000002\.partial"):
        learner.finish_checkpoint(wait=True)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_buffer_that_runs_full_waits_for_the_checkpoint_that_is_being_written(
    model_path: Path, tmp_path: Path, slow_disk: threading.Event
) -> None:
    class Full(FakeBuffer):
        def commit(self, step: int, *, checkpointed: int) -> bool:
            if step == 3:
                slow_disk.set()
            return super().commit(step, checkpointed=checkpointed)

    buffer = Full(batch_of, wants_checkpoint_at=frozenset({3}))
    learner = learner_in_background(model_path, tmp_path, buffer)
    learner.run_step(1)
    learner.run_step(2)
    learner.run_step(3)
    assert [step for what, step in buffer.told if what == "commit"][-2:] == [(3, 0), (3, 2)]
