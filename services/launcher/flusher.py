"""The append-only file of the embedded Redis, written to the disk ten times a second instead of once.

With `appendfsync everysec` Redis has a whole second's groups written at once, and a push that comes meanwhile is
acknowledged when that is done: at 16 MB/s these were the slowest hundredth of all pushes. Written little by little
from here, little is left for Redis' own turn, and a power loss takes less with it. What everysec promises stays Redis'.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EVERY_S = 0.1
LONGEST_S = 5.0
"""Waited for a write that is under way when all ends: a disk may hang."""
FILES = ("appendonlydir/*.incr.aof", "appendonly.aof")
"""Of Redis 7 and Valkey, and of older ones, in the server's folder."""


@contextmanager
def flushed(folder: Path, every_s: float = EVERY_S) -> Iterator[None]:
    """Have what Redis appends in `folder` written while the block runs."""
    over = threading.Event()
    thread = threading.Thread(target=_flush_until, args=(over, Flusher(folder), every_s), name="flusher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LONGEST_S)


def _flush_until(over: threading.Event, flusher: Flusher, every_s: float) -> None:
    while not over.wait(every_s):
        flusher.flush()


class Flusher:
    """Of one server's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[Path, int] = {}
        """Of the files that were there, when they were written last: a quiet disk is left alone."""

    def flush(self) -> None:
        """Write what was appended since the last time. Blocks as long as the disk does."""
        found = (path for pattern in FILES for path in self._folder.glob(pattern))
        self._sizes = {path: self._written(path) for path in found}

    def _written(self, path: Path) -> int:
        try:
            with path.open("rb") as file:
                if (size := os.fstat(file.fileno()).st_size) != self._sizes.get(path):
                    os.fdatasync(file.fileno())
                return size
        except OSError:  # Redis has begun another file; or the disk fails, which Redis finds itself, and refuses pushes
            return -1
