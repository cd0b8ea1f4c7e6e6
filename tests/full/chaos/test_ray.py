"""Real vLLM in a Ray actor: the actor is killed, then the node's raylet, and the run goes on both times."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.launch import FREE_PORTS, REPOSITORY, alive, family, kill_family, start
from tests.support.wait import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SETTINGS = [
    "--run.name", "run", "--run.num_steps", "100000", "--algorithm.batch_size", "8", "--learner.minibatch_size", "4",
    "--evaluation.num_prompts_final", "8", "--evaluation.num_prompts", "8", "--checkpoint.every", "3",
    "--rollout.max_workers", "1", "--buffer.lease_s", "20",
]  # fmt: skip
UP_S = 200.0


def test_a_killed_engine_and_a_killed_raylet_cost_time_and_nothing_else(tmp_path: Path) -> None:
    config = str(REPOSITORY / "deploy/configs/demo.toml")
    process = start(["train", config, "--run.root", str(tmp_path), *SETTINGS, *FREE_PORTS])
    run = RunDirectory(tmp_path / "run")

    def newest() -> int:
        assert process.poll() is None, process.communicate()[0]
        rows = run.read_metrics()
        return int(rows[-1]["step"]) if rows else 0

    def killed(words: str) -> None:
        victims = [member for member in family(process) if words in _command(member)]
        assert victims, f"no process has {words!r} in {[_command(member) for member in family(process)]}"
        for victim in victims:
            victim.kill()

    try:
        wait_until(lambda: newest() >= 2, timeout_s=UP_S, what="step 2")
        for words in ("ray::WorkerActor", "raylet/raylet"):
            killed(words)
            step = newest()
            wait_until(lambda: newest() >= step + 4, timeout_s=UP_S, what=f"steps after {words}")  # noqa: B023
        steps = [row["step"] for row in run.read_metrics()]
        assert steps == list(range(1, len(steps) + 1))
        members = family(process)
        process.terminate()
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130, output
        assert alive(members) == []
    finally:
        kill_family(process)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
