"""Work that mostly does not block, in steps: so that it may begin on the event loop and end in a thread.

A generator that yields before each step that may block: the descriptor on which an answer is to come, or BLOCKS.
"""

from __future__ import annotations

import select
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[int, None, T]

BLOCKS = -1
"""Nothing to wait for beforehand: what follows takes its time."""


def finish(steps: Steps[T]) -> T:
    """The result, however long it takes."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def finish_soon(steps: Steps[T], patience_s: float) -> tuple[T] | None:
    """(the result), or None when a step would block for more than `patience_s`: `finish` goes on from there."""
    while True:
        try:
            descriptor = next(steps)
        except StopIteration as end:
            return (end.value,)
        if descriptor == BLOCKS or not _is_readable(descriptor, patience_s):
            return None


def _is_readable(descriptor: int, patience_s: float) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(1000 * patience_s))
