"""A checkpoint: everything a run needs to resume, `RUN/checkpoints/step-000010`.

    hf/                     the model in Hugging Face format with its tokenizer, float32; also the learner's weights
    optimizer.safetensors   Adam's moments, by parameter name
    critic, reference, supervised .safetensors    PPO critic, replaced pi_ref, optimizer of the cross-entropy
    anchors.safetensors     log pi_gen of groups that may be reused (ratio mode `official`)
    alpha.safetensors       the weights of the workers (a hard link to the published file)
    buffer.bin              the buffer service's snapshot: data position, B_bad, B_high, queues
    state.json              step, counters, canary; written last: a folder without it is not a checkpoint

A checkpoint is written to `step-000010.partial` and renamed when complete, so a crash or a full disk leaves the older
ones intact. There is no RNG state: every draw is keyed by (seed, step, purpose).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file as load_arrays
from torch import Tensor

from bapo.config.tree import Config
from bapo.core.errors import ConfigError, StorageError
from bapo.core.types import Canary
from bapo.runtime.model_files import folder_of
from bapo.runtime.run_directory.files import storing, to_disk
from bapo.runtime.vision import PROCESSOR_FILES
from learner.distributed.sharding import gather_moments, load_moments, num_updates
from learner.distributed.world import World
from learner.model.policy import Policy
from learner.publish_weights import WeightPublisher, gather_weights, link, write_weights
from learner.update.anchors import GenerationMemory
from learner.update.update import Saved

log = logging.getLogger(__name__)

FORMAT = 1
TENSOR_FILES = ("hf/model.safetensors", "optimizer.safetensors", "anchors.safetensors", "alpha.safetensors")
"""Files of every checkpoint; parts with their own state add more."""
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "*.model",
    "chat_template*",
)
IMAGE_FILES = (*PROCESSOR_FILES, "video_preprocessor_config.json")
"""Image preprocessing settings of a vision-language model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """state.json."""

    format: int
    step: int
    """Last step whose update is included in the weights."""
    alpha_version: int
    """Policy version of the workers."""
    num_updates: int
    """Optimizer steps so far: Adam's bias correction."""
    canary: Canary
    """Canary of the alpha weights."""
    anchor_steps: Mapping[str, int]
    """Group id -> step of its first use."""
    parts: Sequence[str]
    """Names of the parts with their own state."""


class CheckpointWriter:
    """Saves checkpoints and removes old ones. Every rank must call `save`; rank 0 writes."""

    def __init__(self, *, config: Config, folder: Path, world: World) -> None:
        """`folder`: RUN/checkpoints."""
        self._config = config
        self._folder = folder
        self._world = world
        self.newest = max(complete_steps(folder), default=0)
        """Step of the newest durable checkpoint; 0 before the first."""

    @property
    def oldest_kept(self) -> int:
        """Oldest step to replay from; 0 (the beginning) until there are `keep_last` checkpoints."""
        steps = complete_steps(self._folder)
        return steps[0] if len(steps) >= self._config.checkpoint.keep_last else 0

    def is_due(self, step: int) -> bool:
        """Every `checkpoint.every` steps, and after the last one."""
        return step % self._config.checkpoint.every == 0 or step == self._config.run.num_steps

    def save(
        self,
        step: int,
        *,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        memory: GenerationMemory,
        parts: Mapping[str, Saved],
        publisher: WeightPublisher,
        buffer_snapshot: bytes,
    ) -> None:
        """Write the checkpoint of `step`. Raises: StorageError; older checkpoints are kept."""
        saved = ((name, part.tensors()) for name, part in parts.items())
        of_parts = {name: tensors for name, tensors in saved if tensors}
        files = {
            "hf/model": gather_weights(policy, torch.float32),
            "optimizer": gather_moments(policy.model, optimizer),
            "anchors": {name: torch.from_numpy(values) for name, values in memory.columns.items()},
            **of_parts,
        }
        if self._world.leads:
            assert publisher.newest is not None, "step 1 publishes before anything is saved"
            state = CheckpointState(
                format=FORMAT,
                step=step,
                alpha_version=publisher.version,
                num_updates=num_updates(optimizer),
                canary=publisher.newest.canary,
                anchor_steps=dict(memory.steps),
                parts=sorted(of_parts),
            )
            self._write(state, files, policy, Path(publisher.newest.path), buffer_snapshot)
        self.newest = step
        self._prune()

    def _write(
        self, state: CheckpointState, files: Mapping[str, dict[str, Tensor]], policy: Policy, alpha: Path, buffer: bytes
    ) -> None:
        partial = self._folder / f"step-{state.step:06d}.partial"
        with storing(partial):
            try:
                shutil.rmtree(partial, ignore_errors=True)
                (partial / "hf").mkdir(parents=True)
                for name, tensors in files.items():
                    write_weights(tensors, partial / f"{name}.safetensors")
                self._write_model_files(policy, partial / "hf")
                link(alpha, partial / "alpha.safetensors")
                (partial / "buffer.bin").write_bytes(buffer)
                (partial / "state.json").write_text(json.dumps(asdict(state)))
                _finish(partial)
            except (OSError, StorageError):
                shutil.rmtree(partial, ignore_errors=True)
                raise

    def _write_model_files(self, policy: Policy, folder: Path) -> None:
        """Write all files of the Hugging Face format except the weights."""
        policy.model.config.save_pretrained(folder)
        if policy.model.can_generate():
            policy.model.generation_config.save_pretrained(folder)
        found = folder_of(self._config.model.path)
        for name in IMAGE_FILES:
            if found is not None and (found / name).is_file():
                shutil.copyfile(found / name, folder / name)
        source = Path(self._config.model.path)
        if not source.is_dir():
            from transformers import AutoTokenizer  # only for a hub id; slow to import

            AutoTokenizer.from_pretrained(self._config.model.path).save_pretrained(folder)
            return
        # Copied, not loaded and saved: a wrongly inferred tokenizer class would change the files.
        for pattern in TOKENIZER_FILES:
            for file in source.glob(pattern):
                shutil.copyfile(file, folder / file.name)

    def _prune(self) -> None:
        if self._world.leads:
            for step in complete_steps(self._folder)[: -self._config.checkpoint.keep_last]:
                _remove(self._folder / f"step-{step:06d}")
                log.info("checkpoint of step %d removed: keep_last=%d", step, self._config.checkpoint.keep_last)


class StoredTensors(Mapping[str, Tensor]):
    """A safetensors file as a lazy mapping, name -> CPU tensor, so that no rank loads a whole checkpoint."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")
        self._names = frozenset(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk, read by a resumed learner."""

    folder: Path
    state: CheckpointState

    @property
    def model_path(self) -> Path:
        """Model folder for `load_policy`."""
        return self.folder / "hf"

    @property
    def alpha_path(self) -> Path:
        """Weights of the workers."""
        return self.folder / "alpha.safetensors"

    def read_buffer(self) -> bytes:
        """The buffer service's snapshot."""
        return (self.folder / "buffer.bin").read_bytes()

    def load_optimizer(self, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Adam's moments and step count, sharded like the parameters. Raises: ConfigError if the model differs."""
        stored = StoredTensors(self.folder / "optimizer.safetensors")
        unknown = {key.split("/", 1)[1] for key in stored} - dict(policy.model.named_parameters()).keys()
        if unknown:
            raise ConfigError(f"{self.folder} contains moments of {sorted(unknown)}, which the model does not have")
        load_moments(policy.model, optimizer, stored, self.state.num_updates)

    def load_parts(self, parts: Mapping[str, Saved]) -> None:
        """Load the state of the parts; a part without stored state is left unchanged."""
        for name, part in parts.items():
            path = self.folder / f"{name}.safetensors"
            if path.exists():
                part.load(StoredTensors(path))

    def load_memory(self, memory: GenerationMemory) -> None:
        """Load log pi_gen of groups that may be reused."""
        columns = load_arrays(self.folder / "anchors.safetensors")
        memory.load(columns, self.state.anchor_steps)


def open_checkpoint(folder: Path, step: int) -> Checkpoint:
    """Open the checkpoint of a step. Raises: StorageError if incomplete, ConfigError if it has another format.

    Does not detect bit rot, which would require reading all of it.
    """
    path = folder / f"step-{step:06d}"
    try:
        fields: dict[str, Any] = dict(json.loads((path / "state.json").read_text()))
        if fields["format"] != FORMAT:
            raise ConfigError(f"{path} has format {fields['format']}, this version reads format {FORMAT}")
        _refuse_damage(path, fields["parts"])
        state = msgspec.convert(fields, CheckpointState)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise StorageError(f"checkpoint {path} is incomplete: {error!r}; {_instead(folder, step)}") from error
    return Checkpoint(folder=path, state=state)


def _refuse_damage(path: Path, parts: Sequence[str]) -> None:
    """Raises: OSError, ValueError, SafetensorError if a file is missing or truncated."""
    json.loads((path / "hf" / "config.json").read_text())
    if not (path / "buffer.bin").is_file():
        raise FileNotFoundError("buffer.bin is missing")
    named = (*TENSOR_FILES, *(f"{name}.safetensors" for name in parts))
    for file in map(path.joinpath, named):
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


def _remove(folder: Path) -> None:
    """Remove a checkpoint such that a kill leaves nothing that looks complete (see `RunDirectory.truncate_after`)."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with suppress(OSError):
        os.replace(folder, partial)
    shutil.rmtree(partial, ignore_errors=True)


def _finish(partial: Path) -> None:
    """Make it durable, then rename it; replaces a checkpoint of the same step from before a resume."""
    started = time.perf_counter()
    for path in (*partial.rglob("*"), partial):
        to_disk(path)
    final = partial.with_suffix("")
    if final.exists():
        shutil.rmtree(final)
    os.replace(partial, final)
    # Older checkpoints are removed next, and the buffer deletes their batches.
    to_disk(final.parent)
    log.info("checkpoint %s sync_s=%.3f", final, time.perf_counter() - started)
