"""The distributed pipeline gives the batches of Algorithm 1, also when it is killed in the middle and resumed.

Real launcher, Redis, buffer service, scheduler, fleet and learner; the scripted engine stands for the model, so that
a plain loop (tests/support/plain_loop.py) can say what every batch must hold.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from bapo.config.load import load_resolved
from bapo.core.types import Origin
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.launch import kill_family, start, train_arguments
from tests.support.plain_loop import PlainBatch, algorithm_1
from tests.support.wait import wait_until

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


def test_a_killed_run_resumes_with_the_batches_of_algorithm_1(tmp_path: Path) -> None:
    victim_step = 5  # between the checkpoints after 3 and 6
    note = f"learner killed after step {victim_step}"
    stays_dead = ["--supervision.max_restarts", "0"]
    process = start(train_arguments(tmp_path, *PAPER_ORDER, *stays_dead, num_steps=NUM_STEPS))
    run = RunDirectory(tmp_path / "outputs" / "run")
    kill_learner_after(run, victim_step, process)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL, f"{note}\n{output}"
    assert f"bapo train --resume {run.path}" in output

    resumed = start(["train", "--resume", str(run.path)])
    try:
        output, _ = resumed.communicate(timeout=WAIT_S)
    finally:
        kill_family(resumed)
    assert resumed.returncode == 0, f"{note}\n{output}"
    assert [row["step"] for row in run.read_metrics()] == list(range(1, NUM_STEPS + 1)), note
    assert_same(batches_of(run), algorithm_1(load_resolved(run.config_path)))


def kill_learner_after(run: RunDirectory, step: int, process: subprocess.Popen[str]) -> None:
    """SIGKILL as soon as the step is on disk, wherever the learner is by then."""

    def is_there() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return any(row["step"] >= step for row in run.read_metrics()) and "learner" in run.read_run()["processes"]

    wait_until(is_there, timeout_s=WAIT_S, what=f"step {step}")
    os.kill(run.read_run()["processes"]["learner"]["pid"], signal.SIGKILL)
