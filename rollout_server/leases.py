"""The groups that a worker has claimed, from the claim to the buffer's acknowledgement.

    claim --> SAMPLING --engine finished--> DELIVERING --stored, or reported as failed--> gone
                 |                              |
                 +------- lease lost -----------+--> gone: somebody else has it

Nothing here survives the process: what is lost with it returns to the queue when its lease ends or is released.
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
        """It waits for its next budget of tokens, or no longer does: while it waits, others may be sampled."""
        with self._changed:
            if paused and request_id in self._sampling:
                self._paused.add(request_id)
            else:
                self._paused.discard(request_id)
            self._changed.notify_all()

    def add(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """Claimed just now. Returns: those that were not held before, which are to be sampled.

        The others come again to the worker that still has them: their leases ended while the buffer was out of reach,
        or Redis has lost the second in which they were claimed. They go on as they are.
        """
        now, monotonic = time.time(), time.monotonic()
        new = []
        with self._changed:
            for request in requests:
                request_id = request.request_id
                if (state := self._state_of(request_id)) is not None:
                    state[request_id] = replace(state[request_id])  # another lease: see `remove`
                    continue
                self._sampling[request_id] = Lease(request=request, claimed_at=now, began=monotonic)
                new.append(request)
        return new

    def sampled(self, request_id: str) -> Lease | None:
        """The engine has finished it. Returns: its lease; None if it was lost meanwhile."""
        with self._changed:
            self._paused.discard(request_id)
            lease = self._sampling.pop(request_id, None)
            if lease is not None:
                self._delivering[request_id] = lease
            self._changed.notify_all()
            return lease

    def remove(self, request_id: str, lost: Lease | None = None) -> Lease | None:
        """Delivered, failed or lost. Returns: its lease, or None if it was not held.

        Args:
            lost: only if it is still held by this lease, and was not claimed again meanwhile.
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
        """All of them, by request id."""
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
        """How many more may be claimed: at least `min_room`, or whatever there is (perhaps 0) after the timeout."""

        def room() -> int:
            held = len(self._sampling) + len(self._delivering)
            return min(max_sampling - len(self._sampling) + len(self._paused), max_held - held)

        with self._changed:
            self._changed.wait_for(lambda: room() >= min_room, timeout_s)
            return max(0, room())

    def wait_empty(self, timeout_s: float) -> bool:
        """Whether nothing is held any more."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._sampling and not self._delivering, timeout_s)
