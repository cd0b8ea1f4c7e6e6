"""A checkpoint: everything a run needs to resume, `RUN/checkpoints/step-000010`.

    learner/                shards of weights, Adam's moments, and what single methods add (a critic, a replaced
                            pi_ref, the optimizer of the cross-entropy), one or more files per rank
    anchors.safetensors     log pi_gen of groups that may be reused (ratio mode `official`)
    alpha.safetensors       the weights of the workers (a hard link to the published file)
    buffer.bin              the buffer service's snapshot: data position, B_bad, B_high, queues
    state.json              step, counters, canary; written last: a folder without it is not a checkpoint
    hf/                     the model in Hugging Face format: of the last step, or by `bapo export` (export.py); with
                            LoRA also adapter/. They stay when the checkpoint is removed

A checkpoint is written to `step-000010.partial` and renamed when complete, so a crash or a full disk leaves the older
ones intact. Every rank writes its shards in the background; the ranks agree after a step that all are on the disk,
and only then rank 0 renames. There is no RNG state: every draw is keyed by (seed, step, purpose).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file as load_arrays

from bapo.config.tree import Config, ModelConfig
from bapo.core.errors import ConfigError, StorageError, WeightMismatchError
from bapo.core.types import Canary
from bapo.runtime.adapter_file import Adapter
from bapo.runtime.run_directory.files import storing, to_disk
from bapo.runtime.run_directory.pruning import remove_checkpoint
from learner.distributed.shard_files import (
    MODEL,
    OPTIMIZER,
    ShardWriter,
    StoredShards,
    joined,
    load_optimizer,
    num_updates,
    optimizer_state,
)
from learner.distributed.sharding import reshard
from learner.distributed.world import World
from learner.held_out import HeldOut
from learner.model.lora import kept_weights
from learner.publish_weights import WeightPublisher, link, write_weights
from learner.update.step import GenerationMemory
from learner.update.update import Updater

log = logging.getLogger(__name__)

FORMAT = 2
SHARDS = "learner"
"""Folder of the shard files."""
TENSOR_FILES = ("anchors.safetensors", "alpha.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """state.json."""

    format: int
    step: int
    """Last step whose update is included in the weights."""
    alpha_version: int
    """Policy version of the workers."""
    num_updates: int
    """Optimizer steps so far."""
    canary: Canary
    """Canary of the alpha weights."""
    anchor_steps: Mapping[str, int]
    """Group id -> step of its first use."""
    num_files: int
    """Number of shard files of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A checkpoint that is being written."""

    step: int
    folder: Path
    state: CheckpointState | None
    """Only on rank 0."""


class CheckpointWriter:
    """Saves checkpoints and removes old ones. Every rank must call `save` and `finish`; each writes its shards."""

    def __init__(self, *, config: Config, folder: Path, world: World, held_out: HeldOut) -> None:
        """`folder`: RUN/checkpoints."""
        self._held_out = held_out
        self._config = config
        self._folder = folder
        self._world = world
        self._shards = ShardWriter(world, background=config.checkpoint.background)
        self._pending: Pending | None = None
        self.newest = max(complete_steps(folder), default=0)
        """Step of the newest durable checkpoint; 0 before the first."""

    @property
    def oldest_kept(self) -> int:
        """Oldest step to replay from; 0 (the beginning) until there are `keep_last` checkpoints."""
        last = complete_steps(self._folder)[-self._config.checkpoint.keep_last :]  # without the best before them
        return last[0] if len(last) >= self._config.checkpoint.keep_last else 0

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._pending is not None

    def is_due(self, step: int) -> bool:
        """Every `checkpoint.every` steps, and after those whose weights are measured and may be kept for it."""
        return step % self._config.checkpoint.every == 0 or self._held_out.will_be_measured(step)

    def save(
        self,
        step: int,
        *,
        updater: Updater,
        publisher: WeightPublisher,
        buffer_snapshot: bytes,
    ) -> None:
        """Start to write the checkpoint of `step`; `finish` completes it. Collective.

        Raises: StorageError; older checkpoints are kept.
        """
        assert self._pending is None, "one at a time"
        folder, state = self._folder / f"step-{step:06d}.partial", None
        if self._world.leads:
            assert publisher.newest is not None, "step 1 publishes before anything is saved"
            state = CheckpointState(
                format=FORMAT,
                step=step,
                alpha_version=publisher.version,
                num_updates=num_updates(updater.optimizer),
                canary=publisher.newest.canary,
                anchor_steps=dict(updater.memory.steps),
                num_files=0,
            )
            with _removed_on_failure(folder):
                _begin(folder, updater.memory, Path(publisher.newest.path), buffer_snapshot)
        self._world.meet()  # the folder exists
        reshard(updater.policy)
        model = updater.policy.model
        trained = {MODEL: kept_weights(model), OPTIMIZER: optimizer_state(model, updater.optimizer)}
        tensors = joined({**trained, **{name: part.tensors() for name, part in updater.parts.items()}})
        self._shards.start(tensors, folder / SHARDS)
        self._pending = Pending(step=step, folder=folder, state=state)

    def finish(self, *, wait: bool = False) -> bool:
        """Complete the checkpoint that is being written, if all ranks have written their shards. Collective.

        Args:
            wait: until they have.
        Returns: whether there is a new checkpoint.
        Raises: StorageError on every rank if one cannot write; older checkpoints are kept.
        """
        pending = self._pending
        if pending is None or (self._world.any(not self._shards.is_done) and not wait):
            return False
        self._pending = None
        with _removed_on_failure(pending.folder):
            error = self._shards.wait()
            if self._world.any(error is not None):
                raise error or OSError("another rank of the learner could not write its shards")
            num_files = int(self._world.sum(torch.tensor([self._shards.num_files])))
            if pending.state is not None:
                _complete(pending.folder, replace(pending.state, num_files=num_files))
        self.newest = pending.step
        self._prune()
        return True

    def _prune(self) -> None:
        if self._world.leads:
            steps = complete_steps(self._folder)
            kept = self._held_out.kept(steps)
            for step in steps[: -self._config.checkpoint.keep_last]:
                if step in kept:
                    continue
                remove_checkpoint(self._folder / f"step-{step:06d}")
                log.info("checkpoint of step %d removed: keep_last=%d", step, self._config.checkpoint.keep_last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk, read by a resumed learner."""

    folder: Path
    state: CheckpointState

    shards: StoredShards

    @property
    def model_path(self) -> Path:
        """Model in Hugging Face format, once exported."""
        return self.folder / "hf"

    @property
    def adapter_path(self) -> Path:
        """The adapter for PEFT, once exported."""
        return self.folder / "adapter"

    @property
    def weights(self) -> StoredShards:
        """Parameters and buffers of the policy."""
        return self.shards.part(MODEL)

    @property
    def alpha_path(self) -> Path:
        """Weights of the workers."""
        return self.folder / "alpha.safetensors"

    def require_adapter_of(self, model: ModelConfig) -> None:
        """Raises: ConfigError if `[model.lora]` or the base model is not that of the run any more."""
        if model.lora is None:
            return
        try:
            Adapter.open(str(self.alpha_path), model.path, model.lora)
        except WeightMismatchError as error:
            raise ConfigError(
                f"{error}. [model.lora] and the base model stay those of a run: set them back, or start a new run from "
                "`bapo export RUN` with model.adapter"
            ) from error

    def read_buffer(self) -> bytes:
        """The buffer service's snapshot."""
        return (self.folder / "buffer.bin").read_bytes()

    def load(self, updater: Updater) -> None:
        """Weights, optimizer, stored anchors and parts; a part without stored state is left unchanged.

        Raises: ConfigError if the model differs.
        """
        model, memory = updater.policy.model, updater.memory
        self.weights.load(kept_weights(model))
        load_optimizer(model, updater.optimizer, self.shards.part(OPTIMIZER))
        memory.columns = load_arrays(self.folder / "anchors.safetensors")
        memory.steps = self.state.anchor_steps
        for name, part in updater.parts.items():
            stored = self.shards.part(name)
            if stored.stored:
                part.load(stored)


def open_checkpoint(folder: Path, step: int) -> Checkpoint:
    """Open the checkpoint of a step. Raises: StorageError if incomplete, ConfigError if it has another format.

    Does not detect bit rot, which would require reading all of it.
    """
    path = folder / f"step-{step:06d}"
    try:
        fields: dict[str, Any] = dict(json.loads((path / "state.json").read_text()))
        if fields["format"] != FORMAT:
            raise ConfigError(f"{path} has format {fields['format']}, this version reads format {FORMAT}")
        state = msgspec.convert(fields, CheckpointState)
        _refuse_damage(path, state.num_files)
        shards = StoredShards.open(path / SHARDS)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise StorageError(f"checkpoint {path} is incomplete: {error!r}; {_instead(folder, step)}") from error
    return Checkpoint(folder=path, state=state, shards=shards)


def _refuse_damage(path: Path, num_files: int) -> None:
    """Raises: OSError, ValueError, SafetensorError if a file is missing or truncated."""
    if not (path / "buffer.bin").is_file():
        raise FileNotFoundError("buffer.bin is missing")
    shards = sorted((path / SHARDS).glob("*.safetensors"))
    if len(shards) != num_files:
        raise FileNotFoundError(f"{SHARDS}/ has {len(shards)} of {num_files} files")
    for file in (*map(path.joinpath, TENSOR_FILES), *shards):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{file.relative_to(path)}: {error}") from error


def _instead(folder: Path, step: int) -> str:
    older = [found for found in complete_steps(folder) if found < step]
    if not older:
        return "there is no older checkpoint, start a new run"
    return f"move it away, then `bapo train --resume` resumes after step {older[-1]}"


def complete_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, in order."""
    found = folder.glob("step-[0-9]*/state.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found if path.parent.suffix != ".partial")


@contextmanager
def _removed_on_failure(partial: Path) -> Iterator[None]:
    """Free the space of a checkpoint that cannot be written. Raises: StorageError."""
    try:
        with storing(partial, SafetensorError):
            yield
    except StorageError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _begin(partial: Path, memory: GenerationMemory, alpha: Path, buffer: bytes) -> None:
    """All files except the shards and state.json."""
    shutil.rmtree(partial, ignore_errors=True)
    (partial / SHARDS).mkdir(parents=True)
    anchors = {name: torch.from_numpy(values) for name, values in memory.columns.items()}
    write_weights(anchors, partial / "anchors.safetensors")
    link(alpha, partial / "alpha.safetensors")
    (partial / "buffer.bin").write_bytes(buffer)


def _complete(partial: Path, state: CheckpointState) -> None:
    """Make it durable, then rename it; replaces a checkpoint of the same step from before a resume."""
    started = time.perf_counter()
    (partial / "state.json").write_text(json.dumps(asdict(state)))
    for path in (*partial.rglob("*"), partial):
        to_disk(path)
    final = partial.with_suffix("")
    if final.exists():
        shutil.rmtree(final)
    os.replace(partial, final)
    # Older checkpoints are removed next, and the buffer deletes their batches.
    to_disk(final.parent)
    log.info("checkpoint %s sync_s=%.3f", final, time.perf_counter() - started)
