"""How the learner ends on SIGTERM or Ctrl-C.

    running --signal--> asked --end of the mini-batch--> Stopped --> exit 0
    waiting (batch)  --signal--> Stopped at once

Of several ranks all end, whichever was asked: they ask each other at the end of a mini-batch, at the beginning of a
step, and each time rank 0 hears what a batch waits for. One that left alone would be lost to the others.

Nothing is saved on the way out: weights in the middle of a step belong to no checkpoint, and the steps after the
newest checkpoint are trained again from the batches that the buffer retains.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(BaseException):
    """The learner was asked to end.

    No Exception, like KeyboardInterrupt: it may come in the middle of a line of the log, which keeps those to itself.
    """


class StopFlag:
    """Set by a signal, read between mini-batches."""

    def __init__(self) -> None:
        self._asked = False
        self._waiting = False

    @property
    def asked(self) -> bool:
        """Whether the learner should end."""
        return self._asked

    def install(self) -> None:
        """Listen to SIGTERM and SIGINT (main thread only)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def ask(self) -> None:
        """What a signal does while the learner computes."""
        self._asked = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within this block a signal raises Stopped at once, also inside a system call."""
        self._waiting = True
        try:
            if self._asked:
                raise Stopped("asked to end")
            yield
        finally:
            self._waiting = False

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Within this block, inside of `waiting`, a signal is only noted: what ranks say is not cut off."""
        was_waiting, self._waiting = self._waiting, False
        try:
            yield
        finally:
            self._waiting = was_waiting

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        if self._waiting:
            raise Stopped(f"{signal.Signals(number).name} while waiting")
