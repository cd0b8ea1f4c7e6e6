"""Log lines that strangers can cause: at most one per second of each kind, or whoever reaches a port fills the disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

EVERY_S = 1.0
MOST_KINDS = 64
"""Remembered; a server has a handful."""


class Seldom(logging.Filter):
    """For a logger whose messages, without their arguments, are few."""

    def __init__(self, every_s: float = EVERY_S, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._every_s, self._now = every_s, now
        self._said_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        return self.is_due(str(record.msg))

    def is_due(self, kind: str) -> bool:
        """Whether a line of this kind may be written now."""
        now = self._now()
        if now - self._said_at.get(kind, float("-inf")) < self._every_s:
            return False
        if len(self._said_at) >= MOST_KINDS:
            self._said_at.clear()
        self._said_at[kind] = now
        return True


def hush_server() -> None:
    """What uvicorn says of requests that are none."""
    logging.getLogger("uvicorn.error").addFilter(Seldom())
