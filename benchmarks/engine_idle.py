"""How long the engine of each worker has nothing to sample, per step, from the records of finished runs.

    bapo train benchmarks/peer_trl/grpo.toml --run.num_steps 60 --run.root outputs/idle
    python -m benchmarks.engine_idle outputs/idle/peer

An engine is idle while no group of its worker is between its claim and its last token. Groups that were claimed while
new weights loaded count from the claim on. Without the first ten steps; a step counts from the end of the one before.
`wait_batch_s`, `sync_s` and `update_s` are the learner's phases.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.training import median

WARM_STEPS = 10
Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps, in order."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def covered(intervals: Iterable[Interval], begin: float, end: float) -> float:
    """Seconds of [begin, end] inside disjoint intervals."""
    return sum(max(0.0, min(end, to) - max(begin, since)) for since, to in intervals)


def busy_of(run: Path) -> dict[str, list[Interval]]:
    """Worker -> when it had a group to sample."""
    found: defaultdict[str, list[Interval]] = defaultdict(list)
    for path in sorted((run / "groups").glob("*.parquet")):
        table = pq.read_table(path, columns=["worker_id", "claimed_at", "sample_s"]).to_pydict()
        for worker, begin, seconds in zip(table["worker_id"], table["claimed_at"], table["sample_s"], strict=True):
            found[worker].append((begin, begin + seconds))
    return {worker: union(intervals) for worker, intervals in found.items()}


def figures(run: Path) -> dict[str, Any]:
    """Means per step of one run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ends = [row["time"] for row in rows[WARM_STEPS:]]
    steps = list(pairwise(ends))
    busy = busy_of(run)
    idle = [1 - covered(intervals, *step) / (step[1] - step[0]) for intervals in busy.values() for step in steps]
    means = {name: statistics.fmean(row[f"{name}_s"] for row in rows[WARM_STEPS + 1 :]) for name in
             ("wait_batch", "sync", "update")}  # fmt: skip
    return {
        "run": str(run),
        "workers": len(busy),
        "step_s_mean": round((ends[-1] - ends[0]) / len(steps), 3),
        "step_s_median": median([end - begin for begin, end in steps]),
        "engine_idle_share_mean": round(statistics.fmean(idle), 3),
        "engine_idle_share_worst_tenth": round(statistics.quantiles(idle, n=10)[-1], 3),
        **{f"{name}_s_mean": round(mean, 3) for name, mean in means.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    for run in parser.parse_args().runs:
        print(json.dumps(figures(run), indent=1))


if __name__ == "__main__":
    main()
