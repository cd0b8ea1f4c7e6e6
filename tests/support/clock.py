"""Time that passes when a test says so."""

from __future__ import annotations


class Clock:
    """Stands where the product takes `now`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
