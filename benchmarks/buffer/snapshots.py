"""Item 7: a snapshot of the buffer on disk against Reverb's checkpoint of the same items; pushes go on meanwhile."""

from __future__ import annotations

import statistics
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bapo.transport.buffer_client import BufferClient
from benchmarks.buffer.groups import SIZES, GroupMaker, ask_for, requests_for
from benchmarks.buffer.rivals import BATCH, Reverb
from benchmarks.buffer.stack import Stack

ITEMS = 1000
RATIO_TARGET, PUSH_TARGET_MS = 5.0, 10.0
PAUSE_S = 0.005
SETTLE_S = 0.2
SIZE = next(size for size in SIZES if size.name == "100K")
SPARE = 400
"""Groups to push while snapshots are taken, per round."""


def measure(folder: Path, rounds: int, reverb_python: Path | None) -> dict[str, Any]:
    """Medians over interleaved rounds."""
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    with ExitStack() as exits:
        stack = exits.enter_context(Stack(folder / "ours", aof=False))
        reverb = Reverb(reverb_python, folder / "reverb") if reverb_python else None
        if reverb is not None:
            exits.callback(reverb.stop)
        first = _fill(stack)
        for index in range(rounds + 1):
            turns = [lambda i=index: ours.append(_ours(stack, folder, first + i * SPARE))]
            if reverb is not None:
                turns.append(lambda r=reverb: theirs.append(_theirs(r)))
            for turn in turns if index % 2 else reversed(turns):
                turn()
    return _summary(ours[1:], theirs[1:])


def _fill(stack: Stack) -> int:
    requests = requests_for(0, ITEMS, 1, BATCH)
    ask_for(stack.client, requests)
    maker = GroupMaker(SIZE.tokens)
    for first in range(0, ITEMS, 16):
        stack.client.push(maker.frames(requests[first : first + 16]))
    return ITEMS


def _ours(stack: Stack, folder: Path, first: int) -> dict[str, Any]:
    requests = requests_for(first, SPARE, first // BATCH, BATCH)
    ask_for(stack.client, requests)
    frames = GroupMaker(SIZE.tokens).frames(requests)
    latencies: list[float] = []
    over = threading.Event()

    def push() -> None:
        client = BufferClient(stack.url)
        for frame in frames:
            if over.is_set():
                return
            begun = time.perf_counter()
            client.push([frame])
            latencies.append(time.perf_counter() - begun)
            time.sleep(PAUSE_S)

    pushing = threading.Thread(target=push)
    pushing.start()
    time.sleep(SETTLE_S)
    quiet = len(latencies)
    begun = time.perf_counter()
    data = stack.client.snapshot()
    taken = time.perf_counter() - begun
    (folder / "snapshot").write_bytes(data)
    seconds = time.perf_counter() - begun
    during = latencies[quiet:]
    over.set()
    pushing.join()
    return {"seconds": seconds, "without_disk_s": taken, "bytes": len(data), "latencies": during}


def _theirs(reverb: Reverb) -> dict[str, Any]:
    requests = requests_for(0, ITEMS, 1, BATCH)
    reverb.load(GroupMaker(SIZE.tokens).frames(requests))
    reverb.ask(do="push", form="writer", per_call=16)
    result: dict[str, Any] = reverb.ask(do="checkpoint", pause_s=PAUSE_S)
    reverb.ask(do="clear")
    return result


def _summary(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    latencies = [1000 * value for result in ours for value in result["latencies"]]
    p99 = float(np.percentile(latencies, 99)) if latencies else 0.0
    found: dict[str, Any] = {
        "items": ITEMS,
        "snapshot_s": round(statistics.median(r["seconds"] for r in ours), 3),
        "snapshot_without_disk_s": round(statistics.median(r["without_disk_s"] for r in ours), 3),
        "bytes": ours[-1]["bytes"],
        "pushes_meanwhile": len(latencies),
        "push_p50_ms": round(float(np.percentile(latencies, 50)), 2) if latencies else None,
        "push_p99_ms": round(p99, 2),
        "push_at_most_ms": PUSH_TARGET_MS,
        "push_met": bool(latencies) and p99 <= PUSH_TARGET_MS,
    }
    if theirs:
        ratio = statistics.median(b["seconds"] / a["seconds"] for a, b in zip(ours, theirs, strict=True))
        slow = [1000 * value for result in theirs for value in result["latencies"]]
        found |= {
            "reverb_checkpoint_s": round(statistics.median(r["seconds"] for r in theirs), 3),
            "reverb_insert_p99_ms": round(float(np.percentile(slow, 99)), 2) if slow else None,
            "ratio": round(ratio, 2),
            "at_least": RATIO_TARGET,
            "met": ratio >= RATIO_TARGET,
        }
    return found
