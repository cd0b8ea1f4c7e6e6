"""Each part of a run killed once, and Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.launch import (
    Start,
    end_by,
    family,
    run_at,
    train_arguments,
    wait_for_step,
)
from tests.support.wait import wait_until


def kill_part(process: subprocess.Popen[str], run: RunDirectory, name: str) -> int:
    """SIGKILL to one process of a run that is under way; returns its id."""
    wait_until(lambda: run.read_run().get("status") == "running", what="run.json says running")
    pid = run.read_run()["processes"][name]["pid"]
    next(member for member in family(process) if member.pid == pid).kill()
    return int(pid)


def test_each_part_that_is_killed_starts_again_and_ctrl_c_ends_the_run(started: Start, tmp_path: Path) -> None:
    process = started(train_arguments(tmp_path, "--supervision.restart_backoff_s", "0.1", num_steps=100_000))
    run = run_at(tmp_path)
    wait_for_step(run, 1, process)
    for victim in ("redis", "buffer_service", "rollout_server", "scheduler", "evaluator", "learner"):
        before = kill_part(process, run, victim)

        def is_back(victim: str = victim, before: int = before) -> bool:
            assert process.poll() is None, process.communicate()[0]
            return bool(run.read_run()["processes"][victim]["pid"] != before)

        wait_until(is_back, what=f"a new {victim}")
        step = run.read_metrics()[-1]["step"]
        wait_for_step(run, step + 3, process)
    assert {name: fields["restarts"] for name, fields in run.read_run()["processes"].items()} == dict.fromkeys(
        ("redis", "buffer_service", "rollout_server", "scheduler", "evaluator", "learner"), 1
    )
    output = end_by(signal.SIGINT, process, run)
    assert "redis failed with signal SIGKILL; restarting in 0.1 s (restart 1, maximum 5 within 600 s" in output
    steps = [row["step"] for row in run.read_metrics()]
    assert steps == list(range(1, len(steps) + 1))
