"""Let a copy of this process do what a response's own text may make endless, and kill it in time.

    with share_of(10.0, 8): ...            each of 8 responses may take a ninth of the 10 s of their group
    said = in_copy(steps)                  what an iterator yields, each a number below 255, until it ends or is killed

A copy, because nothing inside a process stops a product of integers with a billion digits: no exception of a signal
gets there. Seconds are those that the copy computes, so a machine that is busy with other things makes no response
incorrect; the deadline of the whole group is the worker's. A copy has the memory that it finds and 1 GiB more.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import psutil

ALONE_S = 5.0
"""Of one response outside of a grading process."""
MORE_BYTES = 1 << 30
_END = b"\xff"
_share_s = ALONE_S
_until = math.inf
_busy: list[str] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What came of it."""

    values: tuple[int, ...]
    ended: bool
    """The iterator came to its end; False: it was killed, died, or raised."""


@contextmanager
def share_of(group_s: float, num_texts: int) -> Iterator[list[str]]:
    """Inside, `in_copy` takes at most an equal share of a group's seconds; yields what `busy` notes meanwhile.

    One share is left for everything else.
    """
    global _share_s, _until
    before, _share_s, _until = _share_s, group_s / (num_texts + 1), time.monotonic() + group_s
    _busy.clear()
    try:
        yield _busy
    finally:
        _share_s, _until = before, math.inf


def left_s() -> float:
    """Seconds until the worker kills this process, for what waits for others and can give up by itself."""
    return _until - time.monotonic()


def busy(text: str) -> None:
    """Note that a response was not graded to the end, because of its own text, and counts as incorrect."""
    _busy.append(f"{text[:200]!r}")


def in_copy(steps: Iterable[int]) -> Said:
    """Iterate in a copy of this process, for at most the share of one response."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_copy(steps, writing)
    os.close(writing)
    try:
        values = b"".join(iter(lambda: os.read(reading, 64), b""))
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return Said(values=tuple(values.removesuffix(_END)), ended=values.endswith(_END))


def _be_copy(steps: Iterable[int], writing: int) -> NoReturn:
    """Never returns, whatever `steps` does."""
    try:
        signal.setitimer(signal.ITIMER_PROF, _share_s)  # its signal kills, whatever C code is running
        size = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (size + MORE_BYTES,) * 2)
        for value in steps:
            os.write(writing, bytes([value]))
        os.write(writing, _END)
    finally:
        os._exit(0)
