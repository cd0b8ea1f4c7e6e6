"""When a write has left Redis for the kernel, so that it survives the end of Redis' process.

Redis answers a call after its attempt to write the append-only file, whatever became of that: while an fsync is
running (`appendfsync everysec`) the attempt is put off for up to two seconds, and when the disk is full it fails,
silently for the calls that it was made for. Only later ones are refused. So an answer alone proves nothing; a later
INFO does:

    aof_buffer_length == 0                               all that was executed before is written
    aof_current_size >= what an earlier read had found, together with its aof_buffer_length
                                                         all that was executed before that read is written

Sizes are those of one process: a Redis that was started again has nothing unwritten, whatever the one before has lost.
So all reads go over the connection that had the answer; where that ends, the call is to be made again.

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
"""Redis postpones a write by at most two seconds; a disk may then block it for longer."""


@dataclass(frozen=True, slots=True)
class AofState:
    """What `INFO persistence` says of the append-only file."""

    size: int = 0
    """Bytes that the kernel has."""
    base_size: int = 0
    """What it was when it was last rewritten."""
    unwritten: int = 0
    """Bytes that Redis has not written yet."""
    is_refused: bool = False
    """The newest attempt to write failed: the disk is full, or broken."""
    is_off: bool = False
    """There is no append-only file."""


def aof_state_of(info: Mapping[str, Any]) -> AofState:
    """The answer of INFO."""
    return AofState(
        size=info.get("aof_current_size", 0),
        base_size=info.get("aof_base_size", 0),
        unwritten=info.get("aof_buffer_length", 0),
        is_refused=info.get("aof_last_write_status") == "err",
        is_off=not info.get("aof_enabled"),
    )


class Target:
    """What Redis had executed before the first read."""

    def __init__(self) -> None:
        self._end = 0
        self._last = AofState()

    def is_reached(self, seen: AofState) -> bool:
        """Whether all of it is written."""
        if not seen.unwritten:
            return True
        is_rewritten = seen.base_size != self._last.base_size or seen.size < self._last.size
        if not self._last.unwritten or is_rewritten:  # sizes of the old file say nothing about the new one
            self._end = seen.size + seen.unwritten
        self._last = seen
        return seen.size >= self._end


def until_written(first: AofState, read: Callable[[], AofState], where: str) -> None:
    """Return when everything is written that Redis had answered before the first read.

    Args:
        first: a read that was made after the answers.
        read: reads it again.
        where: Redis' address, for people.
    Raises: StorageError when the disk takes no more; UnavailableError when it takes nothing in time.
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
        time.sleep(pause)  # not the first time: what others did in the turn of the first read is written by now
        pause = min(LONGEST_PAUSE_S, max(PAUSE_S, 2 * pause))
        seen = read()


def disk_refuses(where: str, said: str) -> StorageError:
    """Redis at this address has said so."""
    return StorageError(
        f"Redis at {where} cannot write to its disk and takes nothing more; free space there. "
        f"Nothing that was acknowledged is lost. It says: {said}"
    )
