"""Logs of a bounded size: a verifier that prints writes 30 MB/s, and would fill the disk in an hour."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

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
