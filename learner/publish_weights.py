"""The learner's side of a weight update: pi_theta_t becomes the rollout policy alpha (algorithm 1, line 4).

    gather (all ranks) --> file (temporary name, then rename) --> digest and canary --> fleet: every worker loads,
    checks and acknowledges

The file is a safetensors file with Hugging Face parameter names in the engines' dtype, in `RUN/weights`. The two newest
files are kept: the one that workers sample with, and the one that a worker may still be reading.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bapo.config.tree import Config
from bapo.core.types import Canary, WeightUpdate
from bapo.runtime.run_directory.files import storing
from learner.canary import canary_tokens, make_canary
from learner.diagnostics.step_report import Stopwatch
from learner.distributed.sharding import gather, reshard
from learner.distributed.world import World
from learner.model.policy import Policy
from learner.protocols import Fleet

log = logging.getLogger(__name__)

NUM_FILES = 2
FILE_MODE = 0o644
"""safetensors creates files that only their owner can read; workers may run as another user."""


@torch.no_grad()
def gather_weights(policy: Policy, dtype: torch.dtype) -> dict[str, Tensor]:
    """All full parameters and persistent buffers on the CPU of rank 0 (tied parameters once); empty elsewhere.

    Collective.
    """
    reshard(policy)
    saved = policy.model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in policy.model.named_buffers() if name in saved)
    return gather({**dict(policy.model.named_parameters()), **dict(buffers)}, dtype)


def write_weights(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file atomically. Raises: StorageError."""
    temporary = path.with_name(f".{path.name}.tmp")
    with storing(path, SafetensorError):
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
            temporary.chmod(FILE_MODE)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def digest_of(path: Path) -> str:
    """sha256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class WeightPublisher:
    """Publishes weights to the workers and tracks what they have."""

    def __init__(
        self, *, config: Config, policy: Policy, world: World, folder: Path, fleet: Fleet | None, rollback: bool = False
    ) -> None:
        """`fleet`: None on ranks other than 0. `rollback`: the first update may be older than the workers' weights."""
        self._config = config
        self._policy = policy
        self._world = world
        self._folder = folder
        self._fleet = fleet
        self._rollback = rollback
        self._canary_tokens = canary_tokens(config, policy.sampled_tokens)
        self.version = 0
        """Last published version; 0 before the first."""
        self.newest: WeightUpdate | None = None
        """The update message of that version; only on rank 0."""
        self.seconds: Mapping[str, float] = {}
        """Phases of the last update: gather, write, send (until all workers sample with it)."""

    def publish(self, version: int) -> None:
        """alpha <- the current policy. Returns once every worker samples with it or is being replaced.

        Collective. Raises: StorageError; errors of the fleet.
        """
        watch = Stopwatch()
        with watch.phase("gather"):
            tensors = gather_weights(self._policy, getattr(torch, self._config.model.dtype))
            canary = make_canary(self._policy, self._canary_tokens, self._config.model.dtype)
        if self._world.leads:
            path = self._path(version)
            with watch.phase("write"), storing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_weights(tensors, path)
            with watch.phase("send"):
                self._send(version, path, canary)
            log.info("published version=%d %s", version, " ".join(f"{k}_s={v:.3f}" for k, v in watch.seconds.items()))
        self.version, self.seconds = version, watch.seconds

    def publish_again(self, version: int, saved: Path, canary: Canary) -> None:
        """alpha <- the weights in a checkpoint, so that a resumed run continues with the same rollout policy.

        Raises: StorageError; errors of the fleet.
        """
        if self._world.leads:
            path = self._path(version)
            with storing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                link(saved, path)
            self._send(version, path, canary)
            log.info("republished version=%d", version)
        self.version = version

    def _send(self, version: int, path: Path, canary: Canary) -> None:
        assert self._fleet is not None, "rank 0 has a fleet"
        update = WeightUpdate(
            version=version,
            path=str(path.resolve()),
            digest=digest_of(path),
            num_bytes=path.stat().st_size,
            canary=canary,
        )
        timeout_s = self._config.rollout.sync_timeout_s
        seconds = self._fleet.update_weights(update, timeout_s=timeout_s, rollback=self._rollback)
        log.debug("version=%d workers=%s", version, seconds)
        self._rollback = False
        self.newest = update
        self._prune(version)

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
