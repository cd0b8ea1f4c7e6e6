"""Connections that no call has to itself now, of one process.

A forked child inherits what its parent keeps here, and two processes on one connection read each other's answers.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Idle(Generic[T]):
    """The newest first. Thread-safe."""

    def __init__(self, most: int) -> None:
        """`most` are kept."""
        self._most = most
        self._process = os.getpid()
        self._kept: deque[T] = deque()

    def take(self) -> T | None:
        """One of them, if there is one."""
        if os.getpid() != self._process:  # the parent goes on with them; here they are closed, unused
            self._process, self._kept = os.getpid(), deque()
        try:
            return self._kept.pop()
        except IndexError:
            return None

    def keep(self, connection: T) -> bool:
        """Whether it is kept; else it is the caller's to close."""
        if len(self._kept) >= self._most:
            return False
        self._kept.append(connection)
        return True
