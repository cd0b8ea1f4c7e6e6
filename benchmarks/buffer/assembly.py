"""Item 5: assembly of a large batch, what a hundred times more resident groups change, and memory of the index.

The groups are as small as groups can be (one token per response), so that the index is what is measured. Time "in the
store" is what Redis spends inside the scripts and transactions of one assembly, by its own count (INFO commandstats).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.buffer.groups import GroupMaker, ask_for, requests_for
from benchmarks.buffer.stack import Stack

LARGE_BATCH, LARGE_TARGET_MS = 1024, 6.0
FEW, MANY, GROWTH_TARGET = 1_000, 100_000, 2.0
INDEX_TARGET_BYTES = 600.0
PUSH_AT_ONCE = 256
BATCH = 64


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """All of item 5."""
    return {"large_batch": _large_batch(folder / "large", rounds), "resident": _resident(folder / "resident", rounds)}


def _large_batch(folder: Path, rounds: int) -> dict[str, Any]:
    with Stack(folder, aof=False, batch_size=LARGE_BATCH) as stack:
        assembled = []
        for index in range(rounds + 1):
            _push(stack, index * LARGE_BATCH, LARGE_BATCH, index + 1, LARGE_BATCH)
            assembled.append(_assemble(stack, index + 1))
    store_ms = statistics.median(ms for ms, _ in assembled[1:])
    return {
        "groups": LARGE_BATCH,
        "in_store_ms": round(store_ms, 2),
        "whole_call_ms": round(statistics.median(ms for _, ms in assembled[1:]), 2),
        "at_most_ms": LARGE_TARGET_MS,
        "met": store_ms <= LARGE_TARGET_MS,
    }


def _resident(folder: Path, rounds: int) -> dict[str, Any]:
    """Steps of BATCH groups over FEW, then over MANY resident ones; each step's groups are replaced after it."""
    with Stack(folder, aof=False, batch_size=BATCH) as stack:
        place = _Place()
        found: dict[int, tuple[float, float]] = {}
        for resident in (FEW, MANY):
            before = _index_bytes(stack), place.groups
            while place.groups < resident:
                place.push(stack, min(PUSH_AT_ONCE * BATCH, resident - place.groups))
            after = _index_bytes(stack), place.groups
            times = []
            for _ in range(rounds + 1):
                times.append(_assemble(stack, place.next_step()))
                place.push(stack, BATCH)
            found[resident] = (
                statistics.median(ms for ms, _ in times[1:]),
                statistics.median(ms for _, ms in times[1:]),
            )
        per_group = (after[0] - before[0]) / (after[1] - before[1])
    growth = found[MANY][0] / found[FEW][0]
    return {
        "in_store_ms": {str(number): round(times[0], 3) for number, times in found.items()},
        "whole_call_ms": {str(number): round(times[1], 2) for number, times in found.items()},
        "ratio_in_store": round(growth, 2),
        "ratio_whole_call": round(found[MANY][1] / found[FEW][1], 2),
        "at_most": GROWTH_TARGET,
        "met": growth <= GROWTH_TARGET,
        "index_bytes_per_group": round(per_group),
        "index_at_most_bytes": INDEX_TARGET_BYTES,
        "index_met": per_group <= INDEX_TARGET_BYTES,
    }


class _Place:
    """How far the run is."""

    def __init__(self) -> None:
        self.groups = self._pushed = self._step = 0

    def push(self, stack: Stack, number: int) -> None:
        _push(stack, self._pushed, number, self._pushed // BATCH + 1, BATCH)
        self._pushed += number
        self.groups += number

    def next_step(self) -> int:
        self._step += 1
        self.groups -= BATCH
        return self._step


def _push(stack: Stack, first: int, number: int, step: int, batch_size: int) -> None:
    requests = requests_for(first, number, step, batch_size)
    ask_for(stack.client, requests)
    maker = GroupMaker(1)
    for part in range(0, number, PUSH_AT_ONCE):
        stack.client.push(maker.frames(requests[part : part + PUSH_AT_ONCE]))


def _assemble(stack: Stack, step: int) -> tuple[float, float]:
    """(milliseconds inside Redis' scripts, milliseconds of the whole call); the batch is released again."""
    before = _script_us(stack)
    begun = time.perf_counter()
    stack.client.batch_frame(step, timeout_s=60)
    whole_ms = 1000 * (time.perf_counter() - begun)
    in_store_ms = (_script_us(stack) - before) / 1000
    stack.client.commit(step, checkpointed=step)
    return in_store_ms, whole_ms


def _script_us(stack: Stack) -> int:
    stats = stack.redis.client.info("commandstats")
    return sum(int(stats[name]["usec"]) for name in ("cmdstat_evalsha", "cmdstat_exec"))


def _index_bytes(stack: Stack) -> int:
    """Memory of everything but the frames, as Redis estimates it from every element."""
    pipe = stack.redis.client.pipeline(transaction=False)
    for key in _index_keys(stack):
        pipe.memory_usage(key, samples=0)
    return sum(size or 0 for size in pipe.execute())


def _index_keys(stack: Stack) -> Iterator[bytes]:
    return (key for key in stack.redis.client.scan_iter(count=10_000) if b":group:" not in key)
