"""Backpressure: whether the buffer takes more fresh groups, known before the body of a push is read.

    full  =  the next batch can be assembled now, and buffer.max_fresh_groups or buffer.max_fresh_mb is reached
             or its fresh groups are all there, and MEMORY_SHARE of Redis' maxmemory is reached, less what its open
             re-evaluations will take: room that nothing else may fill, because the batch waits for them

While it is full, claims hand out no fresh requests and pushes are answered with 429 and Retry-After. The first halves
rule out a deadlock: what the next batch is missing is always accepted, and stale groups leave the queue with the
assembly that finds them. Re-evaluations and evaluations are always accepted. Batches that wait for a checkpoint are
released by the learner, which is notified when they fill Redis.

Does not cover: a maxmemory that does not hold the fresh groups of one step and everything that is retained, or in step
order those that workers may sample ahead (the launcher warns); Redis then refuses what the batch is missing, and the
reason of the wait names it.

One reading serves all calls for POLL_S; what arrives meanwhile is added to it, so that the limits hold within one push
per instance of the service.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from bapo.config.tree import Config
from bapo.core.errors import FullError, UnavailableError
from buffer_service.assembly import has_its_fresh, is_ready, must_wait_for_round
from buffer_service.state import Memory, Readiness
from buffer_service.store.redis.store import RedisStore

POLL_S = 0.1
MEMORY_SHARE = 0.95
"""Of Redis' maxmemory; the rest is kept for re-evaluations, requests, leases and what a batch needs."""
FILLING_SHARE = 0.75
"""Of Redis' maxmemory; from there on a checkpoint is wanted, if it frees at least FREED_SHARE of it."""
FREED_SHARE = 0.2
MB = 1 << 20


class Backpressure:
    """How full the buffer is, as one instance knows it. Thread-safe."""

    def __init__(
        self,
        store: RedisStore,
        config: Config,
        *,
        wanted: Callable[[int], int] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wanted`: fresh groups that the next step needs; by default those of its first round."""
        self._store, self._config, self._now = store, config, now
        self._wanted = wanted or config.algorithm.fresh_schedule.at
        self._polling = threading.Lock()
        """Held while the store is read: only by `poll`, never on an event loop."""
        self._lock = threading.Lock()
        """Guards the fields below; never held while the store is read."""
        self._inspected = -POLL_S
        self._failures = 0
        self._failure = ""
        """Message of the newest reading that failed."""
        self._forgotten = 0
        self._step = 1
        self._ready: Readiness | None = None
        self._memory = Memory(used=0, limit=0)
        self._admitted = self._stored = 0
        self._batch_ready = self._fresh_ready = False

    @property
    def is_known(self) -> bool:
        """Whether the newest reading is recent; otherwise the next call reads Redis, which takes a millisecond."""
        return self._now() - self._inspected < POLL_S

    def forget(self) -> None:
        """Invalidate the reading: something was consumed, which a reading in progress may not have seen."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._inspected = -POLL_S
        self._forgotten += 1

    def poll(self) -> None:
        """Read the store, unless the newest reading is recent. Blocks. Raises: UnavailableError.

        Callers that wait for a reading fail with it: in turn, each would wait for a store that hangs.
        """
        failures = self._failures
        with self._polling:
            if self.is_known:
                return
            if self._failures != failures:
                raise UnavailableError(self._failure)
            try:
                self._ask()
            except UnavailableError as error:
                self._failures, self._failure = self._failures + 1, str(error)
                raise

    def _ask(self) -> None:
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
            self._ends_look(*before)

    def _ends_look(self, forgotten: int, admitted: int, stored: int) -> None:
        """Subtract what was counted before the reading began: what came since may not be in it."""
        self._admitted -= admitted
        self._stored -= stored
        may_complete = self._stored and self._may_complete()
        if self._forgotten == forgotten and not may_complete:
            self._inspected = self._now()

    def why_full(self) -> str:
        """The limit that is reached; '' while fresh groups are accepted. From the newest reading."""
        if self._batch_ready and (why := self._queue_reached()):
            return why
        return self._memory_reached() if self._fresh_ready else ""

    def has_room(self) -> bool | None:
        """True, or None while fresh groups are refused. Blocks."""
        self.poll()
        return None if self.why_full() else True

    def starved_text(self) -> str:
        """Why Redis may refuse what the next batch is missing; '' if it does not. From the newest reading."""
        return self._memory_reached() if not self._batch_ready else ""

    def wants_checkpoint(self) -> bool:
        """Whether batches that only a checkpoint releases fill Redis, so that the next may not fit. Blocks.

        A checkpoint that frees little is not requested: there would be one at every step.
        """
        memory = self._store.memory()
        if not memory.limit or memory.used < FILLING_SHARE * memory.limit:
            return False
        status = self._store.status()
        kept = [self._store.batch(step) for step in range(status.checkpointed_step + 1, status.assembled_step + 1)]
        return sum(batch.num_bytes for batch in kept if batch is not None) >= FREED_SHARE * memory.limit

    def admit(self, num_bytes: int) -> None:
        """Count a push of fresh groups before it is stored. Raises: FullError when a limit is reached."""
        if why := self.why_full():
            raise _full(why)
        with self._lock:
            self._admitted += num_bytes

    def took(self, num_fresh: int) -> None:
        """Count fresh groups that were stored."""
        with self._lock:
            self._stored += num_fresh
            if self._may_complete():
                self._forget()

    def _may_complete(self) -> bool:
        """Whether what was stored since the newest poll may have completed the batch, and a limit is reached then."""
        if not self._fresh_ready and self._memory_reached():
            return True
        return not self._batch_ready and bool(self._queue_reached())

    def _queue_reached(self) -> str:
        settings, ready = self._config.buffer, self._ready
        if ready is None:
            return ""
        num_fresh = ready.num_fresh + self._stored
        if settings.max_fresh_groups is not None and num_fresh >= settings.max_fresh_groups:
            return f"{num_fresh} fresh groups wait, buffer.max_fresh_groups = {settings.max_fresh_groups}"
        fresh_bytes = ready.fresh_bytes + self._admitted
        if settings.max_fresh_mb is not None and fresh_bytes >= settings.max_fresh_mb * MB:
            return f"{fresh_bytes / MB:.1f} MB of fresh groups wait, buffer.max_fresh_mb = {settings.max_fresh_mb}"
        return ""

    def _memory_reached(self) -> str:
        memory, kept = self._memory, self._kept_for_round()
        if not memory.limit or memory.used + self._admitted + kept < MEMORY_SHARE * memory.limit:
            return ""
        also = f" and keeps {kept / MB:.1f} MB for re-evaluations" if kept else ""
        limit = f"maxmemory = {memory.limit / MB:.1f} (of an embedded one: nine tenths of buffer.max_memory_mb)"
        return f"Redis holds {memory.used / MB:.1f} MB{also}, its {limit}"

    def _kept_for_round(self) -> float:
        """Bytes of the re-evaluations that the next batch waits for, if they are as large as fresh groups are."""
        ready = self._ready
        if ready is None or not ready.num_fresh or not must_wait_for_round(self._step, self._config):
            return 0.0
        return max(0, ready.round_left or 0) * ready.fresh_bytes / ready.num_fresh


def _full(why: str) -> FullError:
    return FullError(
        f"the buffer is full: {why}; groups are taken again when the learner has consumed some, raise that "
        "limit if this stays so"
    )


# The shortfall of the next batch: four ranks that wait and 160 pushes a second would otherwise read Redis 640 times a
# second.

LOOK_EVERY_S = 0.05
"""Interval of readings regardless of the shortfall: other instances of the service may have stored groups."""


@dataclass(frozen=True, slots=True)
class _Shortage:
    step: int
    until: int
    """Groups that this process must have stored in total before the batch can be complete."""
    at: float


class Shortfall:
    """The shortfall of fresh groups that one service process knows. Thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._shortage: _Shortage | None = None
        self.stored = 0
        """Fresh groups that this process has stored. Read before a reading of the store, and given to `found`."""

    def took(self, num_fresh: int) -> None:
        """Count fresh groups that were stored."""
        with self._lock:
            self.stored += num_fresh

    def found(self, step: int, missing: int, stored: int) -> None:
        """The batch of `step` is missing this many fresh groups; `stored` is from before the reading."""
        self._shortage = _Shortage(step, stored + missing, self._now())

    def forget(self) -> None:
        """The state was replaced."""
        self._shortage = None

    def may_be_over(self, step: int) -> bool:
        """Whether the batch of `step` may be complete now."""
        shortage = self._shortage
        if shortage is None or shortage.step != step or self.stored >= shortage.until:
            return True
        return self._now() - shortage.at >= LOOK_EVERY_S
