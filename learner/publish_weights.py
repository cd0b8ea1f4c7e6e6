"""The learner's side of a weight update: pi_theta_t becomes the rollout policy alpha (algorithm 1, line 4).

    all ranks: canary, gather --> host copy --> [ thread: file (temporary name, then rename) --> digest --> fleet:
                                                  every worker loads, checks and acknowledges ]

With `cadence.max_steps_ahead` >= 1 no batch of this step needs the new weights, so training continues while the thread
runs; the next update and the next checkpoint wait for it. With 0, and for the first version, the learner waits.

On GPUs the workers receive the weights while they are gathered (`transfer_weights.py`). The file of that version
follows: for workers that start later, and for those that did not receive it.

The file is a safetensors file in the Hugging Face file format in the engines' dtype, in `RUN/weights`. The two newest
files are kept: the one that workers sample with, and the one that a worker may still be reading.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bapo.config.tree import Config
from bapo.core.types import Canary, WeightUpdate
from bapo.runtime.adapter_file import base_digest, metadata_of
from bapo.runtime.file_digest import digest_of
from bapo.runtime.run_directory.files import storing
from bapo.transport.rollout_client import RolloutClient
from learner.canary import canary_tokens, make_canary
from learner.diagnostics.step_report import Stopwatch
from learner.distributed.shard_files import FILE_MODE, weights_of
from learner.distributed.sharding import gather, reshard
from learner.distributed.world import World
from learner.model.file_format import converts_singly, file_shapes, file_tensors
from learner.model.lora import base_weights, kept_weights, merged_weights
from learner.model.policy import Policy
from learner.transfer_weights import WeightSender, backend_of, in_order, make_sender

log = logging.getLogger(__name__)

NUM_FILES = 2
CLOSE_S = 60.0
"""Longest wait for a file that is being written when the learner stops."""


@torch.no_grad()
def gather_weights(policy: Policy, dtype: torch.dtype) -> dict[str, Tensor]:
    """All full parameters and persistent buffers by name on the CPU of rank 0 (tied ones once); empty elsewhere.

    Collective.
    """
    reshard(policy)
    return gather(weights_of(policy.model), dtype)


def write_weights(tensors: dict[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically. Raises: StorageError."""
    temporary = path.with_name(f".{path.name}.tmp")
    with storing(path, SafetensorError):
        try:
            save_file(tensors, temporary, metadata=dict(metadata or {"format": "pt"}))
            temporary.chmod(FILE_MODE)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


class WeightPublisher:
    """Publishes weights to the workers and tracks what they have."""

    def __init__(
        self,
        *,
        config: Config,
        policy: Policy,
        world: World,
        folder: Path,
        fleet: RolloutClient | None,
        rollback: bool = False,
    ) -> None:
        """
        Args:
            fleet: None on ranks other than 0, and without workers.
            rollback: the first update may be older than the workers' weights.
        """
        self._config = config
        self._policy = policy
        self._world = world
        self._folder = folder
        self._fleet = fleet
        self._rollback = rollback
        self._canary_tokens = canary_tokens(config, policy.sampled_tokens)
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._lora = config.model.lora
        self._metadata: Mapping[str, str] = {}
        if self._lora is not None and world.leads:  # of the base model that was loaded, whatever its files become
            self._metadata = metadata_of(self._lora, base_digest(config.model.path))
        self._sender = None if fleet is None else make_sender(config, fleet, policy.device)
        self._singly = converts_singly(policy.model)
        """Else the weights are converted when they are written, all together."""
        if self._sender is not None and not self._singly:
            log.warning("weights of %s travel as files: it joins parameters in a file", type(policy.model).__name__)
            self._sender = None
        self._transfers = self._singly and backend_of(config, policy.device) != "file"
        """On every rank: whether rank 0 may have a sender, so that all gather what it sends."""
        self._copy: dict[str, Tensor] = {}
        """Host copy of the weights, which the thread reads."""
        self._thread: threading.Thread | None = None
        self._writing = threading.Lock()
        self._received = threading.Event()
        self._error: Exception | None = None
        self._finished: dict[str, float] = {}
        self.version = 0
        """Last version whose publication began, also if workers do not have it yet; 0 before the first."""
        self.newest: WeightUpdate | None = None
        """The update message of the last version that the workers have; only on rank 0."""

    def publish(self, version: int) -> None:
        """alpha <- the current policy. Returns once every worker samples with it or is being replaced; with
        `max_steps_ahead` >= 1 as soon as the weights are copied.

        Collective. Raises: StorageError or errors of the fleet, of this update or of the one before.
        """
        self.wait()
        watch = Stopwatch()
        with watch.phase("gather"):
            canary = make_canary(self._policy, self._canary_tokens, self._config.model.dtype)
            reshard(self._policy)
            # A transfer knows no rollback.
            sender = None if self._rollback else self._sender
            if self._lora is None:
                self._gather_weights(version, canary, sender)
            else:
                self._gather_adapter(version, canary, sender)
        is_first, self.version = self.version == 0, version
        if self._world.leads:
            self._received.clear()
            arguments = (version, canary, watch, sender)
            self._thread = threading.Thread(target=self._deliver, args=arguments, name="publish", daemon=True)
            self._thread.start()
            if is_first or self._config.cadence.max_steps_ahead == 0:
                self._received.wait()
                self.check()

    def wait(self) -> None:
        """Wait until the workers have the last version, and its file is announced. Raises: as `publish`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raises: the error of the update in progress, if it has failed."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Finish a file that is being written, and begin no other; the workers may not get it."""
        # A daemon thread must not return from native code while the interpreter exits.
        self._writing.acquire(timeout=CLOSE_S)

    def take_seconds(self) -> Mapping[str, float]:
        """Phases of the update that has finished since the last call: gather, transfer, write, digest, send (until all
        workers sample with it); empty without one."""
        finished, self._finished = self._finished, {}
        return finished

    def publish_again(self, version: int, saved: Path, canary: Canary) -> None:
        """alpha <- the weights in a checkpoint, so that a resumed run continues with the same rollout policy.

        Raises: StorageError; errors of the fleet.
        """
        if self._world.leads:
            path = self._path(version)
            with storing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                link(saved, path)
            self._send(self._update(version, path, canary))
            log.info("republished version=%d", version)
        self.version = version

    def _gather_weights(self, version: int, canary: Canary, sender: WeightSender | None) -> None:
        tensors = in_order(weights_of(self._policy.model), self._dtype)
        if sender is None:
            gather(tensors, self._dtype, self._copy, convert=self._convert)
        else:
            sender.begin(version, canary, file_shapes(self._policy.model, tensors), self._dtype)
            gather(tensors, self._dtype, self._copy, sender.add, self._convert)
            sender.end()

    def _gather_adapter(self, version: int, canary: Canary, sender: WeightSender | None) -> None:
        """Copy the adapter for its file; a transfer sends the merged weights, which need no base in the engine."""
        if self._transfers:
            base = in_order(base_weights(self._policy.model), self._dtype)
            if sender is not None:
                sender.begin(version, canary, file_shapes(self._policy.model, base), self._dtype)
            for name, tensor in merged_weights(self._policy.model, base, self._dtype):
                if sender is not None:
                    for part in self._convert(name, tensor).values():
                        sender.add(part)
            if sender is not None:
                sender.end()
        gather(kept_weights(self._policy.model), self._dtype, self._copy, convert=self._convert)

    def _convert(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        return file_tensors(self._policy.model, {name: tensor}) if self._singly else {name: tensor}

    def _deliver(self, version: int, canary: Canary, watch: Stopwatch, sender: WeightSender | None) -> None:
        try:
            if sender is not None:
                with watch.phase("transfer"):
                    if sender.finish():
                        self._received.set()
            path = self._path(version)
            with self._writing:
                with watch.phase("write"), storing(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    tensors = self._copy if self._singly else file_tensors(self._policy.model, self._copy)
                    write_weights(tensors, path, self._metadata)
                with watch.phase("digest"):
                    update = self._update(version, path, canary)
            with watch.phase("send"):
                self._send(update)
        except Exception as error:  # noqa: BLE001 - raised in the main thread
            self._error = error
        else:
            self._finished = watch.seconds
            log.info("published version=%d %s", version, " ".join(f"{k}_s={v:.3f}" for k, v in watch.seconds.items()))
        finally:
            self._received.set()

    def _update(self, version: int, path: Path, canary: Canary) -> WeightUpdate:
        with storing(path):
            digest, num_bytes = digest_of(path), path.stat().st_size
        return WeightUpdate(
            version=version, path=str(path.resolve()), digest=digest, num_bytes=num_bytes, canary=canary
        )

    def _send(self, update: WeightUpdate) -> None:
        if self._fleet is not None:  # else no worker samples: the weights are files
            timeout_s = self._config.rollout.sync_timeout_s
            seconds = self._fleet.update_weights(update, timeout_s=timeout_s, rollback=self._rollback)
            log.debug("version=%d workers=%s", update.version, seconds)
        self._rollback = False
        self.newest = update
        self._prune(update.version)

    def _prune(self, version: int) -> None:
        """Keep the newest files up to `version`; delete later versions that a rollback has undone."""
        files = sorted(self._folder.glob("version-*.safetensors"))
        keep = [file for file in files if file <= self._path(version)][-NUM_FILES:]
        for file in files:
            if file not in keep:
                file.unlink(missing_ok=True)

    def _path(self, version: int) -> Path:
        return self._folder / f"version-{version:06d}.safetensors"


def link(source: Path, target: Path) -> None:
    """Hard-link `source` to `target`; copy if the file system does not support links."""
    if target.exists() and target.samefile(source):
        return
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        temporary.write_bytes(source.read_bytes())
    os.replace(temporary, target)
