"""Item 6: many workers and learner ranks at once, paced or at the highest rate, and whether anything was lost."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.buffer.groups import ask_for, requests_for
from benchmarks.buffer.rivals import BATCH
from benchmarks.buffer.stack import Stack, cpu_seconds, resident_bytes
from buffer_service.snapshot import unpack_snapshot

TOKENS_100K = 1540
PACED_MB_PER_S = 16.0
PACED_CONNECTIONS = 8
PACED_S = 30.0
PUSH_TARGET_MS, PULL_TARGET_MS, CORES_TARGET = 10.0, 25.0, 0.25
WORKERS, WORKER_PROCESSES, RANKS = 64, 2, 4
AHEAD = 16 * BATCH
"""Requests that are open or whose groups are not consumed: what a scheduler that samples ahead keeps."""
LIMIT_MB = 512
FULL_LIMIT_MB, FULL_TRAIN_S, FULL_AHEAD = 256, 0.4, 8192
"""A learner that trains so long on each batch, and requests for three times what fits: the buffer is always full."""
DRAIN_S = 15.0
LEAD_S = 4.0
"""Processes start before the clock does."""
WINDOWS = 10
GROUP_MB = 0.0992


def paced(folder: Path, *, aof: bool) -> dict[str, Any]:
    """PACED_MB_PER_S of 100 kB groups on 8 connections, and a learner that looks for a batch every 100 ms."""
    pause_s = PACED_CONNECTIONS * GROUP_MB / PACED_MB_PER_S
    spec = {
        "pause_s": pause_s,
        "workers": PACED_CONNECTIONS,
        "patience_s": 0.001,
        "look_s": 0.1,
        "ranks": 1,
        "claim": 8,
        "schedule_s": 0.25,
    }
    folder = folder / f"paced-{aof}"
    with Stack(folder, aof=aof, max_memory_mb=LIMIT_MB) as stack:
        found = _run(stack, folder, PACED_S, 1, spec)
    push_ms, pull_ms, cores = found["push_ms"]["p99"], found["pull_ms"]["p99"], found["service_and_redis_cores"]
    return found | {
        "limit_mb": LIMIT_MB,
        "push_p99_at_most_ms": PUSH_TARGET_MS,
        "pull_p99_at_most_ms": PULL_TARGET_MS,
        "cores_at_most": CORES_TARGET,
        "met": {"push": push_ms <= PUSH_TARGET_MS, "pull": pull_ms <= PULL_TARGET_MS, "cores": cores <= CORES_TARGET},
    }


def flat_out(folder: Path, seconds: float) -> dict[str, Any]:
    """64 workers and 4 ranks, each as fast as it may."""
    return _long(folder / "soak", seconds, LIMIT_MB, {"schedule_s": 0.05})


def full(folder: Path, seconds: float) -> dict[str, Any]:
    """The same with a learner that is slower than the workers, which wait for room all the time."""
    found = _long(folder / "full", seconds, FULL_LIMIT_MB, {"schedule_s": 0.25, "train_s": FULL_TRAIN_S}, FULL_AHEAD)
    return found | {"was_full": found["redis_used_mb"]["middle"] >= 0.8 * FULL_LIMIT_MB}


def _long(folder: Path, seconds: float, limit_mb: int, extra: dict[str, Any], ahead: int = AHEAD) -> dict[str, Any]:
    spec = {"pause_s": 0.0, "workers": WORKERS, "patience_s": 2.0, "look_s": 0.0, "ranks": RANKS, "claim": 2} | extra
    with Stack(folder, aof=True, max_memory_mb=limit_mb) as stack:
        found = _run(stack, folder, seconds, WORKER_PROCESSES, spec, ahead)
    bound = 1.1 * limit_mb
    met = found["redis_resident_mb"]["most"] <= bound
    return found | {"limit_mb": limit_mb, "memory_at_most_mb": bound, "memory_met": met}


def _run(
    stack: Stack, folder: Path, seconds: float, processes: int, spec: dict[str, Any], ahead: int = AHEAD
) -> dict[str, Any]:
    start = time.time() + LEAD_S
    common = spec | {"url": stack.url, "tokens": [TOKENS_100K], "start": start, "end": start + seconds,
                     "drain_s": DRAIN_S}  # fmt: skip
    each = spec["workers"] // processes
    roles = [("worker", common | {"first": i * each, "number": each}) for i in range(processes)] + [("learner", common)]
    running, ledgers = [], []
    for index, (role, what) in enumerate(roles):
        ledgers.append(folder / f"ledger-{index}.json")
        text = json.dumps(what | {"ledger": str(ledgers[-1])})
        running.append(subprocess.Popen([sys.executable, "-m", "benchmarks.buffer.load", role, text]))
    samples = _schedule(stack, start, start + seconds, spec["schedule_s"], ahead)
    for process in running:
        if process.wait() != 0:
            raise RuntimeError("a simulated worker or learner failed")
    contents = [json.loads(path.read_text()) for path in ledgers]
    return _summary(stack, contents, samples, start, seconds)


def _schedule(stack: Stack, start: float, end: float, pause_s: float, ahead: int) -> list[dict[str, float]]:
    """Keep so many requests open, and read memory and CPU, until the end."""
    asked, samples = 0, []
    while (now := time.time()) < end:
        status = stack.client.status()
        unconsumed = status.queued["fresh"] + status.leased["fresh"] + status.fresh_ready
        if unconsumed <= ahead - BATCH:
            ask_for(stack.client, requests_for(asked, ahead - unconsumed, asked // BATCH + 1, BATCH))
            asked += ahead - unconsumed
        if now >= start:
            service, server = stack.pids
            info = stack.redis.client.info("memory")
            samples.append({
                "cpu_s": cpu_seconds(stack.pids), "time": now, "used": info["used_memory"],
                "redis": resident_bytes(server), "service": resident_bytes(service),
            })  # fmt: skip
        time.sleep(pause_s)
    return samples


def _summary(
    stack: Stack, ledgers: list[dict[str, Any]], samples: list[dict[str, float]], start: float, seconds: float
) -> dict[str, Any]:
    *workers, learner = ledgers
    pushes = np.concatenate([_pairs(ledger["times"].get("push", [])) for ledger in workers])
    pulls = _pairs(learner["times"].get("pull", []))
    edges = np.linspace(start, start + seconds, WINDOWS + 1)
    per_s = np.histogram(pushes[:, 0], edges)[0] / (seconds / WINDOWS)
    elapsed = samples[-1]["time"] - samples[0]["time"]
    return {
        "seconds": seconds,
        "groups_per_s": round(len(pushes) / seconds, 1),
        "groups_per_s_by_window": [round(float(value)) for value in per_s],
        "slowest_window_over_mean": round(float(per_s.min() / per_s.mean()), 3),
        "last_window_over_first": round(float(per_s[-1] / per_s[0]), 3),
        "mb_per_s_in": round(GROUP_MB * len(pushes) / seconds, 1),
        "push_ms": _percentiles(pushes[:, 1]),
        "pull_ms": _percentiles(pulls[:, 1]),
        "commit_ms": _percentiles(_pairs(learner["times"].get("commit", []))[:, 1]),
        "service_and_redis_cores": round((samples[-1]["cpu_s"] - samples[0]["cpu_s"]) / elapsed, 3),
        "redis_used_mb": _range([sample["used"] for sample in samples]),
        "redis_resident_mb": _range([sample["redis"] for sample in samples]),
        "service_resident_mb": _range([sample["service"] for sample in samples]),
        "errors": [ledger["errors"] for ledger in ledgers],
        **_account(stack, workers, learner),
    }


def _account(stack: Stack, workers: list[dict[str, Any]], learner: dict[str, Any]) -> dict[str, Any]:
    """Every acknowledged group is in a batch, was dropped by a rule, or is still there; none was fresh twice."""
    stored = {group_id for ledger in workers for group_id in ledger["ids"]}
    lines = [line.split() for line in learner["ids"]]
    fresh = [group_id for group_id, origin, _ in lines if origin != "x3"]
    image, _ = unpack_snapshot(stack.client.snapshot())
    left = {group.record.group_id for group in image.fresh}
    return {
        "acknowledged": len(stored),
        "batches": int(lines[-1][2]) if lines else 0,
        "left": len(left),
        "lost": len(stored - set(fresh) - left),
        "fresh_twice": len(fresh) - len(set(fresh)),
    }


def _pairs(flat: list[float]) -> Any:
    return np.array(flat, dtype=np.float64).reshape(-1, 2)


def _percentiles(seconds: Any) -> dict[str, float]:
    if len(seconds) == 0:
        return {"p50": 0.0, "p99": 0.0, "most": 0.0}
    p50, p99, most = map(float, 1000 * np.percentile(seconds, [50, 99, 100]))
    return {"p50": round(p50, 2), "p99": round(p99, 2), "most": round(most, 2)}


def _range(values: list[float]) -> dict[str, float]:
    half = values[len(values) // 2]
    return {name: round(value / 2**20, 1) for name, value in
            (("first", values[0]), ("middle", half), ("last", values[-1]), ("most", max(values)))}  # fmt: skip
