"""Graceful stop of the learner on SIGTERM or Ctrl-C.

    running --signal--> stop requested --end of the mini-batch--> Stopped --> exit 0
    waiting (batch)  --signal--> Stopped immediately

All ranks stop together, whichever received the signal: they synchronize at the end of a mini-batch, at the start of a
step, and whenever rank 0 receives a wait reason. A rank that exits alone would be lost to the others.

Nothing is saved on exit: weights in the middle of a step belong to no checkpoint, and the steps after the latest
checkpoint are trained again from the batches that the buffer retains.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(BaseException):
    """The learner was asked to stop.

    A BaseException like KeyboardInterrupt: it may be raised inside logging, which swallows Exceptions.
    """


class StopFlag:
    """Set by a signal, read between mini-batches."""

    def __init__(self) -> None:
        self._asked = False
        self._waiting = False

    @property
    def asked(self) -> bool:
        """Whether the learner should stop."""
        return self._asked

    def install(self) -> None:
        """Install handlers for SIGTERM and SIGINT (main thread only)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def ask(self) -> None:
        """Request a stop, as a signal does while the learner computes."""
        self._asked = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within this block a signal raises Stopped immediately, even inside a system call."""
        self._waiting = True
        try:
            if self._asked:
                raise Stopped("asked to stop")
            yield
        finally:
            self._waiting = False

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Within this block, nested in `waiting`, a signal only sets the flag, so that no message is interrupted."""
        was_waiting, self._waiting = self._waiting, False
        try:
            yield
        finally:
            self._waiting = was_waiting

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        if self._waiting:
            raise Stopped(f"{signal.Signals(number).name} while waiting")
