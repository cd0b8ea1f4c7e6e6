"""Simulated workers and learner ranks: item 6. Run as a process, `python -m benchmarks.buffer.load ROLE SPEC`.

    worker    threads that claim requests and push their groups, one per push, at a given rate or as fast as they may
    learner   threads, one per rank, each of which pulls every batch; rank 0 commits it

The scheduler's share of the work is the driver's (`benchmarks.buffer.soak`). Every process writes what it did to a file
of its own: the ids that it was told are stored, or those that it received and why, and each call's end and duration.
The driver compares these ledgers; the service's own counters are not asked.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from array import array
from pathlib import Path
from typing import Any

from bapo.core.codec import unpack_batch
from bapo.core.errors import DeadlineError, UnavailableError
from bapo.core.types import Batch
from bapo.transport.buffer_client import BufferClient
from benchmarks.buffer.groups import GroupMaker

CLAIM_WAIT_S = 2.0
POLICY_VERSION = 0
"""Of the claims: the least that the requests ask for. A version that nobody has published would get none."""
RETRY_PAUSE_S = 0.05


class Ledger:
    """What one process did; thread-safe by the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ids: list[str] = []
        self.times: dict[str, array[float]] = {}
        self.errors: dict[str, int] = {}

    def took(self, what: str, at: float, seconds: float) -> None:
        """One call that ended at `at`."""
        with self.lock:
            self.times.setdefault(what, array("d")).extend((at, seconds))

    def failed(self, error: Exception) -> None:
        """A call that was refused or broken off, and is tried again."""
        with self.lock:
            name = type(error).__name__
            self.errors[name] = self.errors.get(name, 0) + 1

    def write(self, path: Path) -> None:
        """Once, at the end."""
        content = {"ids": self.ids, "times": {k: v.tolist() for k, v in self.times.items()}, "errors": self.errors}
        path.write_text(json.dumps(content))


def work(spec: dict[str, Any], ledger: Ledger, name: str, offset: int) -> None:
    """One worker until the end of time: claim, sample (nothing), push."""
    client = BufferClient(spec["url"])
    makers = [GroupMaker(tokens) for tokens in spec["tokens"]]
    pause_s, turn = spec["pause_s"], offset
    due = spec["start"] + offset * pause_s / max(1, spec["workers"])
    while time.time() < spec["end"]:
        try:
            requests = client.claim(name, limit=spec["claim"], policy_version=POLICY_VERSION, wait_s=CLAIM_WAIT_S)
            for request in requests:
                frames = makers[turn % len(makers)].frames([request])
                turn += 1
                if pause_s:
                    time.sleep(max(0.0, due - time.time()))
                    due = max(due, time.time() - pause_s) + pause_s
                begun = time.perf_counter()
                results = client.push(frames)
                ledger.took("push", time.time(), time.perf_counter() - begun)
                with ledger.lock:
                    ledger.ids += [group_id for group_id, result in results.items() if result == "stored"]
        except UnavailableError as error:
            ledger.failed(error)
            time.sleep(RETRY_PAUSE_S)


def learn(spec: dict[str, Any], ledger: Ledger, rank: int, together: threading.Barrier) -> None:
    """One rank: every batch from the first on; rank 0 commits it when all have read it."""
    client = BufferClient(spec["url"])
    step, until = 0, spec["end"] + spec["drain_s"]
    while time.time() < until:
        begun = time.perf_counter()
        try:
            frame = client.batch_frame(step + 1, timeout_s=spec["patience_s"])
        except DeadlineError:
            if time.time() > spec["end"]:
                break
            time.sleep(spec["look_s"])
            continue
        except UnavailableError as error:
            ledger.failed(error)
            continue
        ledger.took("pull", time.time(), time.perf_counter() - begun)
        step += 1
        _note(ledger, rank, step, unpack_batch(frame))
        together.wait(until - time.time() + 60)
        if rank == 0:
            begun = time.perf_counter()
            client.commit(step, checkpointed=step)
            ledger.took("commit", time.time(), time.perf_counter() - begun)
        time.sleep(spec.get("train_s", 0.0))
    together.abort()


def _note(ledger: Ledger, rank: int, step: int, batch: Batch) -> None:
    """What became of every group that this assembly looked at; the ranks see the same, so one writes it down."""
    if rank == 0:
        with ledger.lock:
            ledger.ids += [f"{result.group_id} {result.origin or '-'} {step}" for result in batch.results]


def main() -> None:
    logging.getLogger("bapo.transport.buffer_client").setLevel(
        logging.ERROR
    )  # that a push waits is what a full buffer is for
    role, spec = sys.argv[1], json.loads(sys.argv[2])
    ledger = Ledger()
    if role == "worker":
        first, number = spec["first"], spec["number"]
        threads = [
            threading.Thread(target=work, args=(spec, ledger, f"worker-{index}", index))
            for index in range(first, first + number)
        ]
    else:
        together = threading.Barrier(spec["ranks"])
        threads = [threading.Thread(target=learn, args=(spec, ledger, rank, together)) for rank in range(spec["ranks"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.write(Path(spec["ledger"]))


if __name__ == "__main__":
    main()
