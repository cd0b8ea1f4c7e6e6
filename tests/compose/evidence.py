"""What a run in containers has left on its volume: read by programs that took no part in it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from bapo.config.load import load_resolved
from bapo.records import RunDirectory
from bapo.types import Purpose

REUSED = "reused"


def complaints(folder: Path, *, num_steps: int) -> list[str]:
    """What is wrong with the records of a run that has ended; empty when every step trained what it should have."""
    run = RunDirectory.open(folder)
    batch_size = load_resolved(run.config_path).algorithm.batch_size
    found = []
    steps = [row["step"] for row in run.read_metrics()]
    if steps != list(range(1, num_steps + 1)):
        found.append(f"metrics.jsonl has the steps {steps}, not 1 to {num_steps} once each")
    looked_at: Counter[str] = Counter()
    for step, fates in run.read_groups():
        fresh = [fate for fate in fates if fate.purpose is Purpose.FRESH and fate.reason != REUSED]
        if len(fresh) != batch_size:
            found.append(f"step {step} looked at {len(fresh)} fresh groups, not B = {batch_size}")
        trained = Counter(fate.group_id for fate in fates if fate.origin is not None)
        found += [f"step {step} trained {name} {count} times" for name, count in trained.items() if count > 1]
        looked_at.update(fate.group_id for fate in fresh)
    found += [f"{name} was fresh in {count} steps" for name, count in looked_at.items() if count > 1]
    measured = Counter((row["split"], row["version"]) for row in run.read_evaluations())
    found += [
        f"{split} of version {version} was measured {n} times" for (split, version), n in measured.items() if n > 1
    ]
    if run.latest_checkpoint() != num_steps:
        found.append(f"the newest checkpoint is of step {run.latest_checkpoint()}, not {num_steps}")
    return found


def hosts_of(folder: Path) -> Counter[str]:
    """Host of a rollout server -> fresh groups of it that were looked at."""
    return Counter(
        fate.worker_id.partition("-worker-")[0]
        for _, fates in RunDirectory.open(folder).read_groups()
        for fate in fates
        if fate.purpose is Purpose.FRESH and fate.reason != REUSED
    )
