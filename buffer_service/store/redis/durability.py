"""Durability of writes: when Redis has passed a write to the kernel, so that it survives a crash of the process.

Redis replies after its attempt to write the append-only file, whether or not that succeeded: while an fsync is running
(`appendfsync everysec`) the write is postponed for up to two seconds, and if the disk is full it fails without an error
for the affected calls; only later calls are rejected. So a reply alone proves nothing; a later INFO does:

    aof_buffer_length == 0                               everything executed before is written
    aof_current_size >= size + aof_buffer_length of an earlier read
                                                         everything executed before that read is written

The sizes belong to one process: a restarted Redis has no unwritten bytes, whatever was lost in the crash. So all reads
use the connection of the reply; if it breaks, the call must be retried.

Does not cover: power loss, which needs `appendfsync always`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bapo.core.errors import StorageError, UnavailableError

PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.02
TIMEOUT_S = 20.0
"""Redis postpones a write by at most two seconds; the disk may block it for longer."""


@dataclass(frozen=True, slots=True)
class AofState:
    """State of the append-only file, from `INFO persistence`."""

    size: int = 0
    """Bytes passed to the kernel."""
    base_size: int = 0
    """Size after the last rewrite."""
    unwritten: int = 0
    """Bytes not written yet."""
    is_refused: bool = False
    """The last write failed: the disk is full or broken."""
    is_off: bool = False
    """The append-only file is off."""


def aof_state_of(info: Mapping[str, Any]) -> AofState:
    """Parse the reply of INFO."""
    return AofState(
        size=info.get("aof_current_size", 0),
        base_size=info.get("aof_base_size", 0),
        unwritten=info.get("aof_buffer_length", 0),
        is_refused=info.get("aof_last_write_status") == "err",
        is_off=not info.get("aof_enabled"),
    )


class Target:
    """The position in the append-only file to wait for."""

    def __init__(self) -> None:
        self._end = 0
        self._last = AofState()

    def is_reached(self, seen: AofState) -> bool:
        """Whether the position is written."""
        if not seen.unwritten:
            return True
        is_rewritten = seen.base_size != self._last.base_size or seen.size < self._last.size
        if not self._last.unwritten or is_rewritten:  # sizes of the old file do not apply to the new one
            self._end = seen.size + seen.unwritten
        self._last = seen
        return seen.size >= self._end


def until_written(first: AofState, read: Callable[[], AofState], where: str) -> None:
    """Wait until everything is written that Redis had replied to before the first read.

    Args:
        first: a read made after the replies.
        read: returns the current state.
        where: Redis' address, for messages.
    Raises: StorageError if the disk rejects writes; UnavailableError after TIMEOUT_S.
    """
    target, seen, pause = Target(), first, 0.0
    deadline = time.monotonic() + TIMEOUT_S
    while not target.is_reached(seen):
        if seen.is_refused:
            raise disk_refuses(where, "aof_last_write_status:err")
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"Redis has not written its append-only file for {TIMEOUT_S:.0f} s: its disk is busy"
            )
        time.sleep(pause)  # not before the second read: commands of the same event loop iteration are written by now
        pause = min(LONGEST_PAUSE_S, max(PAUSE_S, 2 * pause))
        seen = read()


def disk_refuses(where: str, said: str) -> StorageError:
    """The error for a Redis that cannot write its append-only file."""
    return StorageError(
        f"Redis at {where} cannot write to its disk and rejects writes; free up disk space there. "
        f"Acknowledged writes are not lost. Redis error: {said}"
    )
