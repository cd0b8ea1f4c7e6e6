"""Time of a store that passes when a test says so."""

from __future__ import annotations

from dataclasses import dataclass

from bapo.core.types import Purpose
from buffer_service.store.base import Store
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.redis.keys import Keys


class ShiftedClock:
    """Redis has its own clock, so what it has written down is moved into the past instead."""

    def __init__(self, link: RedisLink, run: str) -> None:
        self.seconds = 0.0
        self._link, self._keys = link, Keys(run)

    def move(self, seconds: int) -> None:
        """So many seconds pass."""
        self.seconds += seconds
        client = self._link.client
        for purpose in Purpose:
            leases = self._keys[f"leases_{purpose.value}"]
            for member in client.zrange(leases, 0, -1):
                client.zincrby(leases, -1000 * seconds, member)
        for worker in client.zrange(self._keys["heard"], 0, -1):
            client.zincrby(self._keys["heard"], -1000 * seconds, worker)


@dataclass(frozen=True)
class TimedStore:
    """A store with leases of a minute, and its clock."""

    store: Store
    clock: ShiftedClock
