"""The distributed pipeline gives the batches of Algorithm 1, also when it is killed in the middle and resumed.

Real launcher, Redis, buffer service, scheduler, fleet and learner; the scripted engine stands for the model, so that
a plain loop (tests/support/plain_loop.py) can say what every batch must hold.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo.config.load import load_resolved
from bapo.core.types import Origin
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.launch import kill_family, start, train_arguments
from tests.support.plain_loop import PlainBatch, algorithm_1

NUM_STEPS = 14
WAIT_S = 150.0
PAPER_ORDER = [
    "--cadence.v", "2", "--cadence.m", "2", "--cadence.slack", "0", "--cadence.wait_for_reevaluation", "true",
    "--algorithm.max_reevaluated", "4", "--task.options.num_train", "24", "--task.options.cd3_share", "1.0",
    "--rollout.engine_options.skill_start", "0.2", "--rollout.engine_options.skill_gain", "0.05",
    "--checkpoint.every", "3", "--evaluation.every", "0",
]  # fmt: skip


def batches_of(run: RunDirectory) -> list[PlainBatch]:
    """What each step trained, from the run's group records."""
    r_tots = {row["step"]: row["r_tot"] if "r_tot" in row else row["reward_mean"] for row in run.read_metrics()}
    batches = []
    for step, fates in run.read_groups():
        parts = {origin: sorted(f.prompt_id for f in fates if f.origin == origin) for origin in Origin}
        batches.append(PlainBatch(parts[Origin.X1], parts[Origin.X2], parts[Origin.X3], r_tots[step]))
    return batches


def assert_same(found: list[PlainBatch], expected: list[PlainBatch]) -> None:
    assert len(found) == len(expected) == NUM_STEPS
    for step, (mine, plain) in enumerate(zip(found, expected, strict=True), start=1):
        assert (mine.x1, mine.x2, mine.x3) == (plain.x1, plain.x2, plain.x3), f"step {step}"
        assert mine.r_tot == pytest.approx(plain.r_tot, abs=1e-6), f"step {step}"


def test_the_plain_loop_uses_every_part_of_the_algorithm(tmp_path: Path) -> None:
    process = start([*train_arguments(tmp_path, *PAPER_ORDER, num_steps=NUM_STEPS), "--dry-run"])
    resolved, _ = process.communicate(timeout=60)
    config_path = tmp_path / "resolved.toml"
    config_path.write_text(resolved)
    batches = algorithm_1(load_resolved(config_path))
    assert sum(len(batch.x1) for batch in batches) > 20
    assert sum(len(batch.x2) for batch in batches) > 4
    assert sum(len(batch.x3) for batch in batches) > 4


def test_without_slack_every_batch_is_that_of_the_plain_loop(tmp_path: Path) -> None:
    process = start(train_arguments(tmp_path, *PAPER_ORDER, num_steps=NUM_STEPS))
    try:
        output, _ = process.communicate(timeout=WAIT_S)
    finally:
        kill_family(process)
    assert process.returncode == 0, output
    run = RunDirectory.open(tmp_path / "outputs" / "run")
    assert_same(batches_of(run), algorithm_1(load_resolved(run.config_path)))
    assert [row["staleness_x1_max"] for row in run.read_metrics()][:4] == [0, 0, 1, 0]  # versions 1, 2, 2, 4
