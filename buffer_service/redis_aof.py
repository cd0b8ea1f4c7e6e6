"""When a write has left Redis for the kernel, so that it survives the end of Redis' process.

Under `appendfsync everysec` Redis answers before it writes its append-only file whenever an fsync is running: for up to
two seconds, on a busy disk, a killed Redis forgets what it has acknowledged. Redis says so in INFO:

    aof_pending_bio_fsync == 0    everything executed so far is written before this very INFO is answered
    otherwise                     written once aof_current_size has reached what it was, plus aof_buffer_length

Does not cover: power loss, which needs `appendfsync always`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from bapo.errors import UnavailableError

PAUSE_S = 0.002
TIMEOUT_S = 20.0
"""Redis postpones a write by at most two seconds; a disk may then block it for longer."""

_AOF_NUMBER = re.compile(rb"aof_(\w+):(\d+)\r")  # begins with letters, which are searched for much faster than ^
_AOF_OFF = b"aof_enabled:0\r"

Info = Mapping[str, Any]


def aof_fields(reply: bytes) -> dict[str, int]:
    """The numbers about the append-only file in the text of INFO: parsing all of it costs more than a small push."""
    if _AOF_OFF in reply:
        return {"aof_enabled": 0}
    return {f"aof_{name.decode()}": int(number) for name, number in _AOF_NUMBER.findall(reply)}


def wait_written(info: Info, read: Callable[[], Info]) -> None:
    """Return when everything is written that was executed before `info` was taken.

    Args:
        info: `INFO persistence`, executed right behind the write.
        read: takes another one.
    Raises: UnavailableError when the disk does not take it in time.
    """
    target = _end(info)
    size = info.get("aof_current_size", 0)
    deadline = time.monotonic() + TIMEOUT_S
    while info.get("aof_enabled") and info.get("aof_pending_bio_fsync") and info["aof_current_size"] < target:
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"Redis has not written its append-only file for {TIMEOUT_S:.0f} s: its disk is busy"
            )
        time.sleep(PAUSE_S)
        info = read()
        if info["aof_current_size"] < size:  # the file was rewritten, and starts small again
            target = _end(info)
        size = info["aof_current_size"]


def _end(info: Info) -> int:
    return int(info.get("aof_current_size", 0)) + int(info.get("aof_buffer_length", 0))
