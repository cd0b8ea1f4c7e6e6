"""What a run in containers has left on its volume: read by programs that took no part in it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from bapo.config.load import load_resolved
from bapo.core.types import Purpose
from bapo.runtime.run_directory.layout import RunDirectory

NOT_LOOKED_AT = ("reused", "stale")
"""Results of an assembly that are none of its B fresh groups: of X3, and of those too old, which are asked again."""


def complaints(folder: Path, *, num_steps: int, is_whole: bool = True) -> list[str]:
    """What is wrong with the records of a run that has ended; empty when every step trained what it should have.

    Args:
        num_steps: that it has trained.
        is_whole: it ended by itself; else it was stopped on its way.
    """
    run = RunDirectory.open(folder)
    config = load_resolved(run.config_path)
    batch_size = config.algorithm.batch_size
    found = []
    steps = [row["step"] for row in run.read_metrics()]
    if steps != list(range(1, num_steps + 1)):
        found.append(f"metrics.jsonl has the steps {steps}, not 1 to {num_steps} once each")
    looked_at: Counter[str] = Counter()
    for step, results in run.read_groups():
        fresh = [result for result in results if result.purpose is Purpose.FRESH and result.reason not in NOT_LOOKED_AT]
        if len(fresh) != batch_size:
            found.append(f"step {step} looked at {len(fresh)} fresh groups, not B = {batch_size}")
        trained = Counter(result.group_id for result in results if result.origin is not None)
        found += [f"step {step} trained {name} {count} times" for name, count in trained.items() if count > 1]
        looked_at.update(result.group_id for result in fresh)
    found += [f"{name} was fresh in {count} steps" for name, count in looked_at.items() if count > 1]
    measured = Counter((row["split"], row["version"]) for row in run.read_evaluations())
    found += [
        f"{split} of version {version} was measured {n} times" for (split, version), n in measured.items() if n > 1
    ]
    newest = run.latest_checkpoint()
    due = num_steps if is_whole else num_steps - num_steps % config.checkpoint.every
    # One that was stopped behind a step, but in front of its checkpoint, is one checkpoint behind.
    if newest != due and (is_whole or newest != due - config.checkpoint.every):
        found.append(f"the newest checkpoint is of step {newest}, not {due}")
    return found


def last_step(folder: Path) -> int:
    """The last one that has a record."""
    return max((row["step"] for row in RunDirectory.open(folder).read_metrics()), default=0)


def hosts_of(folder: Path) -> Counter[str]:
    """Host of a rollout server -> fresh groups of it that were looked at."""
    return Counter(
        result.worker_id.partition("-worker-")[0]
        for _, results in RunDirectory.open(folder).read_groups()
        for result in results
        if result.purpose is Purpose.FRESH and result.reason not in NOT_LOOKED_AT
    )
