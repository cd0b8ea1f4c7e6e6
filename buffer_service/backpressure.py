"""Backpressure: whether the buffer accepts more fresh groups, decided before the body of a push is read.

    full  =  the next batch can be assembled now, and buffer.max_fresh_groups or buffer.max_fresh_mb is reached
             or all its fresh groups have arrived, and Redis uses MEMORY_SHARE of its maxmemory, minus the space
             reserved for the open re-evaluations that the batch waits for

While the buffer is full, claims lease no fresh requests and pushes get 429 with Retry-After. The first conditions
rule out a deadlock: groups that the next batch needs are always accepted, and stale groups leave the queue with the
assembly that finds them. Re-evaluations and evaluations are always accepted. Batches retained for a checkpoint are
released by the learner, which is notified when they fill Redis.

Does not cover: a maxmemory too small for the fresh groups of one step plus everything retained (in step order, plus
the groups that workers may sample ahead; the launcher warns). Redis then rejects groups that the batch needs, and the
wait reason reports it.

One reading serves all calls for POLL_S; later arrivals are added to it, so that the limits are exceeded by at most one
push per instance of the service.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from bapo.algorithms.composers.registry import load_composer
from bapo.config.tree import Config
from bapo.core.errors import FullError, UnavailableError
from buffer_service.assembly import has_its_fresh, is_ready, must_wait_for_round
from buffer_service.state import Memory, Readiness
from buffer_service.store.redis.store import RedisStore

POLL_S = 0.1
MEMORY_SHARE = 0.95
"""Fraction of Redis' maxmemory; the rest is reserved for re-evaluations, requests, leases and assembly."""
FILLING_SHARE = 0.75
"""Fraction of Redis' maxmemory above which a checkpoint is requested, if it frees at least FREED_SHARE."""
FREED_SHARE = 0.2
MB = 1 << 20


class Backpressure:
    """How full the buffer is, from the view of one service instance. Thread-safe."""

    def __init__(
        self,
        store: RedisStore,
        config: Config,
        *,
        wanted: Callable[[int], int] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wanted`: number of fresh groups the next step needs; default: those of its first round."""
        self._store, self._config, self._now = store, config, now
        self._wanted = wanted or load_composer(config.algorithm).fresh_schedule.at
        self._polling = threading.Lock()
        """Held while the store is read: only in `poll`, never on an event loop."""
        self._lock = threading.Lock()
        """Guards the fields below; never held while the store is read."""
        self._inspected = -POLL_S
        self._failures = 0
        self._failure = ""
        """Message of the last failed reading."""
        self._forgotten = 0
        self._step = 1
        self._ready: Readiness | None = None
        self._memory = Memory(used=0, limit=0)
        self._admitted = self._stored = 0
        self._batch_ready = self._fresh_ready = False

    @property
    def is_known(self) -> bool:
        """Whether the last reading is recent; otherwise the next call reads Redis, which takes about 1 ms."""
        return self._now() - self._inspected < POLL_S

    def forget(self) -> None:
        """Invalidate the reading: groups were consumed that a concurrent reading may have missed."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._inspected = -POLL_S
        self._forgotten += 1

    def poll(self) -> None:
        """Read the store, unless the last reading is recent. Blocks. Raises: UnavailableError.

        Callers waiting for a reading fail together with it: one after the other, each would wait for a hanging store.
        """
        failures = self._failures
        with self._polling:
            if self.is_known:
                return
            if self._failures != failures:
                raise UnavailableError(self._failure)
            try:
                self._read_store()
            except UnavailableError as error:
                self._failures, self._failure = self._failures + 1, str(error)
                raise

    def _read_store(self) -> None:
        with self._lock:
            before = self._forgotten, self._admitted, self._stored
        memory, ready, step = self._store.memory(), self._store.readiness(self._step), self._step
        if ready.assembled + 1 != step:
            step = ready.assembled + 1
            ready = self._store.readiness(step)
        wanted = self._wanted(step)
        with self._lock:
            self._memory, self._ready, self._step = memory, ready, step
            self._batch_ready = is_ready(step, ready, self._config, wanted)
            self._fresh_ready = has_its_fresh(ready, self._config, wanted)
            self._finish_reading(*before)

    def _finish_reading(self, forgotten: int, admitted: int, stored: int) -> None:
        """Subtract what was counted before the reading began; later arrivals may not be included in it."""
        self._admitted -= admitted
        self._stored -= stored
        may_complete = self._stored and self._may_complete()
        if self._forgotten == forgotten and not may_complete:
            self._inspected = self._now()

    def full_reason(self) -> str:
        """The limit that was reached according to the last reading; '' while fresh groups are accepted."""
        if self._batch_ready and (why := self._queue_reached()):
            return why
        return self._memory_reached() if self._fresh_ready else ""

    def has_room(self) -> bool | None:
        """True, or None while fresh groups are rejected. Blocks."""
        self.poll()
        return None if self.full_reason() else True

    def shortage_reason(self) -> str:
        """Why Redis may reject groups that the next batch needs, by the last reading; '' if it accepts them."""
        return self._memory_reached() if not self._batch_ready else ""

    def wants_checkpoint(self) -> bool:
        """Whether Redis is filling up with batches that only a checkpoint releases. Blocks.

        No checkpoint is requested if it would free little: there would be one at every step.
        """
        memory = self._store.memory()
        if not memory.limit or memory.used < FILLING_SHARE * memory.limit:
            return False
        status = self._store.status()
        kept = [self._store.batch(step) for step in range(status.checkpointed_step + 1, status.assembled_step + 1)]
        return sum(batch.num_bytes for batch in kept if batch is not None) >= FREED_SHARE * memory.limit

    def admit(self, num_bytes: int) -> None:
        """Count a push of fresh groups before it is stored. Raises: FullError if a limit is reached."""
        if why := self.full_reason():
            raise _full(why)
        with self._lock:
            self._admitted += num_bytes

    def took(self, num_fresh: int) -> None:
        """Count stored fresh groups."""
        with self._lock:
            self._stored += num_fresh
            if self._may_complete():
                self._forget()

    def _may_complete(self) -> bool:
        """Whether groups stored since the last poll may have completed the batch, with a limit reached."""
        if not self._fresh_ready and self._memory_reached():
            return True
        return not self._batch_ready and bool(self._queue_reached())

    def _queue_reached(self) -> str:
        settings, ready = self._config.buffer, self._ready
        if ready is None:
            return ""
        num_fresh = ready.num_fresh + self._stored
        if settings.max_fresh_groups is not None and num_fresh >= settings.max_fresh_groups:
            return f"{num_fresh} fresh groups queued, buffer.max_fresh_groups = {settings.max_fresh_groups}"
        fresh_bytes = ready.fresh_bytes + self._admitted
        if settings.max_fresh_mb is not None and fresh_bytes >= settings.max_fresh_mb * MB:
            return f"{fresh_bytes / MB:.1f} MB of fresh groups queued, buffer.max_fresh_mb = {settings.max_fresh_mb}"
        return ""

    def _memory_reached(self) -> str:
        memory, kept = self._memory, self._kept_for_round()
        if not memory.limit or memory.used + self._admitted + kept < MEMORY_SHARE * memory.limit:
            return ""
        also = f" and reserves {kept / MB:.1f} MB for re-evaluations" if kept else ""
        limit = f"maxmemory is {memory.limit / MB:.1f} MB (embedded Redis: 90 % of buffer.max_memory_mb)"
        return f"Redis uses {memory.used / MB:.1f} MB{also}; {limit}"

    def _kept_for_round(self) -> float:
        """Estimated bytes of the re-evaluations that the next batch waits for, from the size of fresh groups."""
        ready = self._ready
        if ready is None or not ready.num_fresh or not must_wait_for_round(self._step, self._config):
            return 0.0
        return max(0, ready.round_left or 0) * ready.fresh_bytes / ready.num_fresh


def _full(why: str) -> FullError:
    return FullError(
        f"the buffer is full: {why}; fresh groups are accepted again once the learner consumes some; raise that "
        "limit if this persists"
    )


# The shortfall of the next batch. Without it, 4 waiting ranks and 160 pushes per second would read Redis 640 times per
# second.

LOOK_EVERY_S = 0.05
"""Read at this interval regardless of the shortfall: other service instances may have stored groups."""


@dataclass(frozen=True, slots=True)
class _Shortage:
    step: int
    until: int
    """Total number of groups this process must have stored before the batch can be complete."""
    at: float


class Shortfall:
    """Shortfall of fresh groups as known to one service process. Thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._shortage: _Shortage | None = None
        self.stored = 0
        """Fresh groups this process has stored. Read it before reading the store and pass it to `found`."""

    def took(self, num_fresh: int) -> None:
        """Count stored fresh groups."""
        with self._lock:
            self.stored += num_fresh

    def found(self, step: int, missing: int, stored: int) -> None:
        """Record that the batch of `step` needs this many more fresh groups; `stored` is from before the reading."""
        self._shortage = _Shortage(step, stored + missing, self._now())

    def forget(self) -> None:
        """Reset after the state was replaced."""
        self._shortage = None

    def may_be_over(self, step: int) -> bool:
        """Whether the batch of `step` may be complete now."""
        shortage = self._shortage
        if shortage is None or shortage.step != step or self.stored >= shortage.until:
            return True
        return self._now() - shortage.at >= LOOK_EVERY_S
