"""The groups that a worker has claimed, from the claim to the buffer's acknowledgement.

    claim --> SAMPLING --engine finished--> DELIVERING --stored, or reported as failed--> removed
                 |                              |
                 +------- lease lost -----------+--> removed: another worker has it

In memory only: after a crash the requests return to the queue when their leases expire or are released.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bapo.core.types import RolloutRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One claimed request."""

    request: RolloutRequest
    claimed_at: float
    """Unix time."""
    began: float
    """Monotonic time of the claim."""


class Leases:
    """Thread-safe. Every request is in exactly one state, and only moves forward."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sampling: dict[str, Lease] = {}
        self._delivering: dict[str, Lease] = {}
        self._paused: set[str] = set()

    def pause(self, request_id: str, paused: bool) -> None:
        """Mark a group that waits for its next token budget, or no longer does; others are sampled meanwhile."""
        with self._changed:
            if paused and request_id in self._sampling:
                self._paused.add(request_id)
            else:
                self._paused.discard(request_id)
            self._changed.notify_all()

    def add(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """Add claimed requests. Returns: the new ones, which must be sampled.

        A request may be claimed again if its lease expired while the buffer was down, or Redis lost the last second
        of writes; it continues.
        """
        now, monotonic = time.time(), time.monotonic()
        new = []
        with self._changed:
            for request in requests:
                request_id = request.request_id
                if (state := self._state_of(request_id)) is not None:
                    state[request_id] = replace(state[request_id])  # a new lease: see `remove`
                    continue
                self._sampling[request_id] = Lease(request=request, claimed_at=now, began=monotonic)
                new.append(request)
        return new

    def sampled(self, request_id: str) -> Lease | None:
        """The engine has finished a group. Returns: its lease; None if it was lost."""
        with self._changed:
            self._paused.discard(request_id)
            lease = self._sampling.pop(request_id, None)
            if lease is not None:
                self._delivering[request_id] = lease
            self._changed.notify_all()
            return lease

    def remove(self, request_id: str, lost: Lease | None = None) -> Lease | None:
        """Remove a delivered, failed or lost group. Returns: its lease; None if there is none.

        Args:
            lost: remove only if this is still its lease: it may have been claimed again.
        """
        with self._changed:
            state = self._state_of(request_id)
            if state is None or (lost is not None and state[request_id] is not lost):
                return None
            self._paused.discard(request_id)
            lease = state.pop(request_id)
            self._changed.notify_all()
            return lease

    def held(self) -> Mapping[str, Lease]:
        """All leases, by request id."""
        with self._changed:
            return {**self._sampling, **self._delivering}

    def _state_of(self, request_id: str) -> dict[str, Lease] | None:
        for state in (self._sampling, self._delivering):
            if request_id in state:
                return state
        return None

    def __len__(self) -> int:
        with self._changed:
            return len(self._sampling) + len(self._delivering)

    def wait_for_room(self, *, max_sampling: int, max_held: int, min_room: int, timeout_s: float) -> int:
        """Number of requests that may be claimed: at least `min_room`, or after the timeout the current room."""

        def room() -> int:
            held = len(self._sampling) + len(self._delivering)
            return min(max_sampling - len(self._sampling) + len(self._paused), max_held - held)

        with self._changed:
            self._changed.wait_for(lambda: room() >= min_room, timeout_s)
            return max(0, room())

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until there are no leases. Returns: whether that is the case."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._sampling and not self._delivering, timeout_s)
