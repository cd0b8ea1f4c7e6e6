"""Runs in the paper's order, whose batches must be those of the plain loop."""

from __future__ import annotations

import pytest

from bapo.core.types import Origin
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.plain_loop import PlainBatch

NUM_STEPS = 14


PAPER_ORDER = [
    "--cadence.weight_sync_interval", "2", "--cadence.reevaluation_interval", "2",
    "--cadence.max_steps_ahead", "0", "--cadence.wait_for_reevaluation", "true",
    "--algorithm.max_reevaluated", "4", "--task.options.num_train", "24", "--task.options.cd3_share", "1.0",
    "--rollout.engine_options.skill_start", "0.2", "--rollout.engine_options.skill_gain", "0.05",
    "--checkpoint.every", "3", "--evaluation.every", "0",
]  # fmt: skip


def batches_of(run: RunDirectory) -> list[PlainBatch]:
    """What each step trained, from the run's group records."""
    r_tots = {row["step"]: row["r_tot"] if "r_tot" in row else row["reward_mean"] for row in run.read_metrics()}
    batches = []
    for step, results in run.read_groups():
        parts = {origin: sorted(f.prompt_id for f in results if f.origin == origin) for origin in Origin}
        batches.append(PlainBatch(parts[Origin.X1], parts[Origin.X2], parts[Origin.X3], r_tots[step]))
    return batches


def assert_same(found: list[PlainBatch], expected: list[PlainBatch]) -> None:
    assert len(found) == len(expected) == NUM_STEPS
    for step, (mine, plain) in enumerate(zip(found, expected, strict=True), start=1):
        assert (mine.x1, mine.x2, mine.x3) == (plain.x1, plain.x2, plain.x3), f"step {step}"
        assert mine.r_tot == pytest.approx(plain.r_tot, abs=1e-6), f"step {step}"
