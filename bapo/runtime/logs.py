"""Log lines that strangers can cause: at most one per second of each kind, or any caller could fill the disk."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

EVERY_S = 1.0
MAX_KINDS = 64
"""Remembered; a server has a handful."""


class RateLimitedFilter(logging.Filter):
    """For a logger whose messages, without their arguments, are few."""

    def __init__(self, every_s: float = EVERY_S, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._every_s, self._now = every_s, now
        self._said_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        return self.is_due(str(record.msg))

    def is_due(self, kind: str) -> bool:
        """Whether a line of this kind may be written now."""
        now = self._now()
        if now - self._said_at.get(kind, float("-inf")) < self._every_s:
            return False
        if len(self._said_at) >= MAX_KINDS:
            self._said_at.clear()
        self._said_at[kind] = now
        return True


def hush_server() -> None:
    """What uvicorn says of requests that are none."""
    logging.getLogger("uvicorn.error").addFilter(RateLimitedFilter())


MAX_LOG_BYTES = 32 << 20
"""Of one log; its rotated part may have as many."""


def rotated_path(log_path: Path) -> Path:
    """Where the older part of a log goes: `worker-0.log.1`."""
    return log_path.with_name(f"{log_path.name}.1")


def bound_log(log_path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Rotate a log that is larger than `max_bytes`: its newest part replaces `rotated_path`, and it begins again.

    Its writers keep their descriptors, which must be opened for appending (O_APPEND); what they write between the copy
    and the cut is lost. A full disk costs the copy, never the cut.
    """
    with suppress(FileNotFoundError), log_path.open("rb+") as log_file:
        if os.fstat(log_file.fileno()).st_size <= max_bytes:
            return
        with suppress(OSError):  # the disk is full: the log goes all the same
            log_file.seek(-max_bytes, os.SEEK_END)
            rotated_path(log_path).write_bytes(log_file.read(max_bytes))
        log_file.truncate(0)


class LogFollower:
    """Reads the logs of a folder, `<part>.log`: the latest lines, then what is added."""

    def __init__(self, folder: Path, part: str | None = None) -> None:
        """`part`: only this log; None: all, also those that appear later."""
        self._folder, self._part = folder, part
        self._read: dict[str, int] = {}
        """Bytes of each log that were read, up to the end of a line."""

    def parts(self) -> list[str]:
        """Names of the logs that exist, sorted."""
        return [path.stem for path in sorted(self._folder.glob(f"{self._part or '*'}.log"))]

    def latest(self, part: str, num_lines: int) -> list[str]:
        """The last lines of a log; `new_lines` continues after them."""
        lines = self._new_of(part)
        return lines[max(0, len(lines) - num_lines) :]

    def new_lines(self) -> Iterator[tuple[str, str]]:
        """(part, line) of every whole line since the last call."""
        for part in self.parts():
            for line in self._new_of(part):
                yield part, line

    def _new_of(self, part: str) -> list[str]:
        with suppress(FileNotFoundError), (self._folder / f"{part}.log").open("rb") as log_file:
            size = os.fstat(log_file.fileno()).st_size
            start = self._read.get(part, 0)
            start = 0 if start > size else start  # rotated
            log_file.seek(start)
            whole, newline, _ = log_file.read(size - start).rpartition(b"\n")
            self._read[part] = start + len(whole) + len(newline)
            return whole.decode(errors="replace").splitlines() if newline else []
        return []
