"""Rate limiting of log lines that any caller can cause, so that callers cannot fill the disk; and log rotation."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

EVERY_S = 1.0
MAX_KINDS = 64
"""Maximum number of tracked kinds; a server has a handful."""


class RateLimitedFilter(logging.Filter):
    """Log filter for loggers with few distinct message templates."""

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


class StopFilter(logging.Filter):
    """A server that stops cancels the requests that still wait, and answers 503 or breaks streams: no error."""

    def filter(self, record: logging.LogRecord) -> bool:
        """How many were cancelled is written, and not where each of them waited."""
        if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
            return False
        if "timeout graceful shutdown exceeded" in str(record.msg):
            record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        return True


def hush_server() -> None:
    """Rate-limit uvicorn's messages about invalid requests, and let a stop be no error."""
    for each in (RateLimitedFilter(), StopFilter()):
        logging.getLogger("uvicorn.error").addFilter(each)


MAX_LOG_BYTES = 32 << 20
"""Size limit of a log; its rotated part may be as large."""


def rotated_path(log_path: Path) -> Path:
    """Path of the rotated part of a log: `worker-0.log.1`."""
    return log_path.with_name(f"{log_path.name}.1")


def bound_log(log_path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Rotate a log larger than `max_bytes`: copy its last part to `rotated_path`, then truncate it.

    Writers keep their descriptors, which must be opened with O_APPEND; what they write between copy and truncation is
    lost. If the disk is full, the log is truncated without a copy.
    """
    with suppress(FileNotFoundError), log_path.open("rb+") as log_file:
        if os.fstat(log_file.fileno()).st_size <= max_bytes:
            return
        with suppress(OSError):  # the disk is full: truncate anyway
            log_file.seek(-max_bytes, os.SEEK_END)
            rotated_path(log_path).write_bytes(log_file.read(max_bytes))
        log_file.truncate(0)


class LogFollower:
    """Follows the logs of a folder, `<part>.log`: the last lines, then new lines."""

    def __init__(self, folder: Path, part: str | None = None) -> None:
        """`part`: only this log; None: all, including those created later."""
        self._folder, self._part = folder, part
        self._read: dict[str, int] = {}
        """Read position in each log, at the end of a line."""

    def parts(self) -> list[str]:
        """Names of the existing logs, sorted."""
        return [path.stem for path in sorted(self._folder.glob(f"{self._part or '*'}.log"))]

    def latest(self, part: str, num_lines: int) -> list[str]:
        """The last lines of a log; `new_lines` continues after them."""
        lines = self._new_of(part)
        return lines[max(0, len(lines) - num_lines) :]

    def new_lines(self) -> Iterator[tuple[str, str]]:
        """(part, line) of every complete line since the last call."""
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
