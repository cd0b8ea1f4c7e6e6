"""Which ranks of the learner are alive: a thread of each increments a counter in the rendezvous store once a second.

A collective that fails reports a lost peer, not which one: a rank that waits for a lost rank keeps others waiting too.
Counters tell them apart, because the thread runs also while its rank waits. A rank that was killed or stopped, or whose
host is lost, does not increment its counter. Rank 0 logs such ranks long before the deadline of collectives, at which
NCCL aborts the processes, and ends itself at that deadline if it waits for something else, for example for a batch.

Not torch's `monitored_barrier`: it names the lost rank on rank 0 only, cannot continue after a rank that was stopped,
and needs a group and a thread of its own as well.
"""

from __future__ import annotations

import logging
import threading
import time

from torch.distributed import Store  # type: ignore[attr-defined]  # exported without __all__

from bapo.core.errors import RankLostError
from bapo.runtime.process import end_now

log = logging.getLogger(__name__)

ALIVE, CALLED = "bapo/alive", "bapo/called"
"""Counters of each rank in the store."""
PERIOD_S = 1.0
SILENT_S = 30.0
"""How long a rank is silent before rank 0 logs it."""


class RollCall:
    """This rank's part of the roll call."""

    def __init__(self, store: Store, rank: int, size: int, lost_after_s: float) -> None:
        """
        Args:
            store: that of the process group.
            lost_after_s: silence of a rank after which rank 0 ends itself, and with its store the others.
        """
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # a connection of its own: a waiting rank may use the other
        self._rank = rank
        self._size = size
        self._lost_after_s = max(lost_after_s, SILENT_S)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="roll-call", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop counting."""
        self._stopped.set()
        self._thread.join()

    def absent(self, *, wait_s: float = 5 * PERIOD_S) -> list[int]:
        """Ranks that do not count for `wait_s` and did not call this, too; rank 0 if its store does not answer.

        For a rank that is about to exit, because it lost one of them.
        """
        try:
            self._store.add(f"{CALLED}/{self._rank}", 1)
            before = self._counts(ALIVE)
            time.sleep(wait_s)
            after, called = self._counts(ALIVE), self._counts(CALLED)
        except RuntimeError:  # rank 0, which has the store, is lost
            return [0]
        return [rank for rank in range(self._size) if after[rank] == before[rank] and not called[rank]]

    def _counts(self, what: str) -> list[int]:
        return [self._store.add(f"{what}/{rank}", 0) for rank in range(self._size)]

    def _run(self) -> None:
        counts, seen, silent = [0] * self._size, [time.monotonic()] * self._size, set[int]()
        while not self._stopped.wait(PERIOD_S):
            try:
                self._store.add(f"{ALIVE}/{self._rank}", 1)
                found = self._counts(ALIVE) if self._rank == 0 else counts
            except RuntimeError:
                return  # rank 0 is lost: collectives fail
            if self._rank == 0:
                now = time.monotonic()
                seen = [now if found[rank] != counts[rank] else seen[rank] for rank in range(self._size)]
                counts = found
                self._report({rank for rank in range(self._size) if now - seen[rank] > SILENT_S}, silent)
                if now - min(seen) > self._lost_after_s:
                    log.error("rank %d of the learner is lost: ending the run", seen.index(min(seen)))
                    end_now(RankLostError.exit_code)

    def _report(self, now: set[int], before: set[int]) -> None:
        for rank in sorted(now - before):
            log.error(
                "rank %d of the learner is silent for %.0f s: it was killed or stopped, or its host is lost; the "
                "others wait for it until learner.collective_timeout_min",
                rank,
                SILENT_S,
            )
        for rank in sorted(before - now):
            log.info("rank %d of the learner is back", rank)
        before.clear()
        before.update(now)
