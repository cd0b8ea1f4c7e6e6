"""When a write has left Redis for the kernel, so that it survives the end of Redis' process.

Redis answers a call behind its attempt to write the append-only file, whatever became of that: while an fsync is
running (`appendfsync everysec`) the attempt is put off for up to two seconds, and when the disk is full it fails,
silently for the calls that it was made for. Only later ones are refused. So an answer alone proves nothing; a look at
INFO that is sent behind it does:

    aof_buffer_length == 0                               all that was executed before is written
    aof_current_size >= what an earlier look had found, together with its aof_buffer_length
                                                         all that was executed before that look is written

Sizes are those of one process: a Redis that was started again has nothing unwritten, whatever the one before has lost.
So all looks must be at the process that has answered; where another one is found, the call is to be made again.

With `appendfsync always` Redis writes before it answers, and ends itself when it cannot: there an answer is proof.

Does not cover: power loss, which needs `appendfsync always`.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from bapo.errors import StorageError, UnavailableError
from buffer_service.steps import BLOCKS, Steps

PAUSE_S = 0.002
TIMEOUT_S = 20.0
"""Redis postpones a write by at most two seconds; a disk may then block it for longer."""
LOOKS_AT_ONCE = 2
"""The second one finds written what others did in the turn of the first, unless the disk is busy."""

_AOF_NUMBER = re.compile(rb"aof_(\w+):(\d+)\r")  # begins with letters, which are searched for much faster than ^
_ALL_WRITTEN = b"aof_buffer_length:0\r"
_AOF_OFF = b"aof_enabled:0\r"
_REFUSED = b"aof_last_write_status:err\r"


@dataclass(frozen=True, slots=True)
class AofState:
    """What `INFO persistence` says of the append-only file."""

    size: int = 0
    """Bytes that the kernel has."""
    base_size: int = 0
    """What it was when it was last rewritten."""
    unwritten: int = 0
    """Bytes that Redis has not written yet."""
    is_postponed: bool = False
    """Because an fsync is running."""
    is_refused: bool = False
    """The newest attempt to write failed: the disk is full, or broken."""
    server: str = ""
    """The process that says so (`run_id` of INFO)."""


WRITTEN = AofState()


def aof_state_of(reply: bytes, server: str) -> AofState:
    """The answer of INFO: the most frequent one by one search, because parsing all costs more than a small push."""
    if _ALL_WRITTEN in reply or _AOF_OFF in reply:
        return AofState(server=server)
    found = {name: int(number) for name, number in _AOF_NUMBER.findall(reply)}
    return AofState(
        size=found.get(b"current_size", 0),
        base_size=found.get(b"base_size", 0),
        unwritten=found.get(b"buffer_length", 0),
        is_postponed=bool(found.get(b"pending_bio_fsync")),
        is_refused=_REFUSED in reply,
        server=server,
    )


def is_off(reply: bytes) -> bool:
    """The answer of INFO says that there is no append-only file."""
    return _AOF_OFF in reply


def is_always(reply: object) -> bool:
    """The answer of `CONFIG GET appendfsync`; False for a managed Redis that refuses to tell."""
    values = reply.values() if isinstance(reply, dict) else reply if isinstance(reply, list) else ()
    return b"always" in values


class Target:
    """What Redis had executed before the first look."""

    def __init__(self) -> None:
        self._end = 0
        self._last = WRITTEN

    def is_reached(self, look: AofState) -> bool:
        """Whether all of it is written."""
        if not look.unwritten:
            return True
        is_rewritten = look.base_size != self._last.base_size or look.size < self._last.size
        if not self._last.unwritten or is_rewritten:  # sizes of the old file say nothing about the new one
            self._end = look.size + look.unwritten
        self._last = look
        return look.size >= self._end


class SharedLooks:
    """Looks that threads have in common: one serves all who wait when it begins, so that Redis is not asked by each."""

    def __init__(self, look: Callable[[], AofState]) -> None:
        self._look = look
        self._changed = threading.Condition()
        self._begun = self._ended = 0
        self._is_taken = False
        self._newest = WRITTEN

    def next(self) -> AofState:
        """One that begins after this call, soon. Raises: what `look` raises, for the thread that makes it."""
        with self._changed:
            wanted = self._begun + 1
            while self._is_taken:
                self._changed.wait()
                if self._ended >= wanted:
                    return self._newest
            self._is_taken = True
        return self._made()

    def _made(self) -> AofState:
        try:
            time.sleep(PAUSE_S)
            with self._changed:
                self._begun += 1
            found = self._look()
            with self._changed:
                self._newest, self._ended = found, self._begun
            return found
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()


def until_written(
    look: Callable[[], Steps[AofState]], shared: SharedLooks, where: str, first: AofState, server: str
) -> Steps[None]:
    """Return when everything is written that Redis had answered before the first look.

    Args:
        look: takes one now.
        where: Redis' address, for people.
        first: one that was taken behind the answers.
        server: the process that has given them.
    Raises: StorageError when the disk takes no more; UnavailableError when it takes nothing in time, or when another
        process is there: what the one before had not written is lost.
    """
    target, seen, num_looks = Target(), first, 1
    while not _is_written(target, seen, server, where):
        if seen.is_postponed or num_looks == LOOKS_AT_ONCE:
            break
        seen, num_looks = (yield from look()), num_looks + 1
    else:
        return
    yield BLOCKS
    deadline = time.monotonic() + TIMEOUT_S
    while not _is_written(target, shared.next(), server, where):
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"Redis has not written its append-only file for {TIMEOUT_S:.0f} s: its disk is busy"
            )


def _is_written(target: Target, seen: AofState, server: str, where: str) -> bool:
    if seen.server != server:
        raise UnavailableError(f"Redis at {where} was started again before it had written what it answered: ask again")
    if target.is_reached(seen):
        return True
    if seen.is_refused:
        raise disk_refuses(where, "aof_last_write_status:err")
    return False


def disk_refuses(where: str, said: str) -> StorageError:
    """Redis at this address has said so."""
    return StorageError(
        f"Redis at {where} cannot write to its disk and takes nothing more; free space there. "
        f"Nothing that was acknowledged is lost. It says: {said}"
    )
