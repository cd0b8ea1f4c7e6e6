"""The folder of a Ray node of our own: it goes with the node, or with the next one if that was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX, LOCK = "bapo-ray-", "bapo.lock"
SHORT = Path("/tmp")  # noqa: S108 - folders in it are made by mkdtemp
"""Paths of unix sockets may have 107 bytes, and Ray's own part of them takes most of that."""
YOUNG_S = 10.0
"""A folder as young as this may belong to somebody who has yet to lock it."""


class RayFolder:
    """One life's folder. The kernel gives its lock back however the process ends."""

    def __init__(self, parent: Path = SHORT) -> None:
        """Make it, and remove those of processes that are gone."""
        _remove_gone(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = (self.path / LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """With all that Ray has left there."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_gone(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # locked; another user's; without a lock, because its maker died first
            status = folder.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < YOUNG_S:
                continue
            with (folder / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
