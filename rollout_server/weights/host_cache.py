"""Weight files for workers: the learner's file where this host can read it, otherwise one copy per host.

The first worker of a host verifies the file or downloads the copy under a lock, the others wait for it; after a failure
the next one continues the download. The two newest copies of a run are kept.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bapo.config.tree import Config
from bapo.core.errors import ConfigError, WeightsAbsentError
from bapo.core.types import WeightUpdate
from bapo.runtime.run_directory.files import replace_file, storing
from bapo.transport.rollout_client import fetch_file, part_of
from bapo.transport.service_client import ServiceClient
from rollout_server.weights.receive import can_be_read, check_file

log = logging.getLogger(__name__)

NUM_COPIES = 2
TIMEOUT_S = 10.0


def copies_folder(config: Config) -> Path:
    """Directory of this host's copies of a run's files."""
    # The number, because a container's user may have no name.
    folder = config.rollout.weights_cache or str(Path(tempfile.gettempdir()) / f"bapo-weights-{os.getuid()}")
    return Path(folder) / config.run.name


def make_copies_folder(config: Config) -> None:
    """Create it. In /tmp another user may have created it, and could replace checked copies.

    Raises: ConfigError; OSError.
    """
    folder = copies_folder(config)
    if not config.rollout.weights_cache:
        base = folder.parent
        base.mkdir(exist_ok=True, mode=stat.S_IRWXU)
        found = base.lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            raise ConfigError(
                f"{base}, the cache of weight files, is not owned by this user: remove it, or set another "
                "folder in rollout.weights_cache"
            )
        base.chmod(stat.S_IRWXU)
    folder.mkdir(parents=True, exist_ok=True, mode=stat.S_IRWXU)


class WeightCache:
    """Not thread-safe."""

    def __init__(self, config: Config, token: str | None = None) -> None:
        """`token`: API token for the rollout server; None: the process's own."""
        self._config = config
        self._folder = copies_folder(config)
        self._retry_s = config.rollout.sync_timeout_s
        self._token = token

    def fetch(self, update: WeightUpdate) -> WeightUpdate:
        """The update with the path of a verified file on this host.

        Raises: WeightMismatchError; WeightsAbsentError when no server has the file; StorageError; ConfigError when the
            folder of copies belongs to another user.
        """
        is_here = can_be_read(update.path)
        if not is_here and not update.url:
            raise WeightsAbsentError(f"weights of version {update.version}: {update.path} is not readable on this host")
        copy = self._folder / f"{update.digest}.safetensors"
        with storing(copy):
            make_copies_folder(self._config)
            with (self._folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if is_here:
                    self._check_once(update)
                elif not copy.is_file():
                    self._download(update, copy)
        return update if is_here else replace(update, path=str(copy))

    def _check_once(self, update: WeightUpdate) -> None:
        """Hash the file, unless a worker of this host has verified the unchanged file before."""
        try:
            note, found = self._folder / "verified", Path(update.path).stat()
        except FileNotFoundError as error:  # there are two newer versions
            raise WeightsAbsentError(f"weights of version {update.version}: {update.path} was deleted") from error
        identity = f"{update.digest} {found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}"
        if not note.is_file() or note.read_text() != identity:
            check_file(update)
            replace_file(note, identity.encode())

    def _download(self, update: WeightUpdate, copy: Path) -> None:
        server = ServiceClient(
            "the rollout server", update.url, timeout_s=TIMEOUT_S, retry_s=self._retry_s, token=self._token
        )
        for part in self._folder.glob(".*.part"):
            if part != part_of(copy):
                part.unlink(missing_ok=True)  # of weights that are older than these
        began = time.monotonic()
        fetch_file(server, update.digest, update.num_bytes, copy)
        log.info(
            "fetched weights version=%d bytes=%d seconds=%.3f",
            update.version,
            update.num_bytes,
            time.monotonic() - began,
        )
        copies = sorted(self._folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
        for old in copies[:-NUM_COPIES]:
            old.unlink(missing_ok=True)
