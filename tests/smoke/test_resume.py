"""The distributed pipeline gives the batches of Algorithm 1, also when it is killed in the middle and resumed.

Real launcher, Redis, buffer service, scheduler, fleet and learner; the scripted engine stands for the model, so that
a plain loop (tests/support/plain_loop.py) can say what every batch must hold.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from bapo.config.load import load_resolved
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.launch import kill_family, start, train_arguments
from tests.support.paper_order import NUM_STEPS, PAPER_ORDER, assert_same, batches_of
from tests.support.plain_loop import algorithm_1
from tests.support.wait import wait_until

WAIT_S = 150.0


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
