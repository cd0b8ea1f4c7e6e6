"""A run whose prompts are chosen by what it has learnt: killed in the middle, it asks for the same ones."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.launch import family, start, train_arguments
from tests.support.wait import wait_until

END_S = 180.0
NUM_STEPS = 10
DETERMINISTIC = [
    # Each step has its own groups, and what they give depends on prompt and step alone.
    "--cadence.max_steps_ahead", "0", "--rollout.engine_options", '{clock = "step", latency_s = 0.05}',
    "--task.options", "{num_train = 120, num_held_out = 20}", "--evaluation.every", "0",
    "--supervision.restart_backoff_s", "0.1",
]  # fmt: skip
OWN = {"mopps": "pool_ratio=4.0", "kimi": "curriculum_steps=20"}


def prompts_by_request(run: RunDirectory) -> dict[str, str]:
    """Fresh request -> its prompt, over all steps."""
    results = (result for _, results in run.read_groups() for result in results)
    return {result.group_id: result.prompt_id for result in results if result.group_id.startswith("fresh-")}


def kill_part(process: subprocess.Popen[str], run: RunDirectory, name: str) -> None:
    """SIGKILL to one process of the run, and wait for the next one."""
    before = run.read_run()["processes"][name]["pid"]
    next(member for member in family(process) if member.pid == before).kill()
    wait_until(lambda: run.read_run()["processes"][name]["pid"] != before, timeout_s=30.0, what=f"a new {name}")


def newest_step(run: RunDirectory) -> int:
    rows = run.read_metrics()
    return int(rows[-1]["step"]) if rows else 0


@pytest.mark.parametrize("selector", OWN)
def test_scheduler_and_learner_killed_in_the_middle_change_no_prompt(
    processes: list[subprocess.Popen[str]], tmp_path: Path, selector: str
) -> None:
    found = []
    for name in ("whole", "killed"):
        overrides = ["--algorithm.selector", selector, f"--selector.{OWN[selector]}", *DETERMINISTIC]
        process = start(train_arguments(tmp_path, *overrides, name=name, num_steps=NUM_STEPS))
        processes.append(process)
        run = RunDirectory(tmp_path / "outputs" / name)
        if name == "killed":
            for victim, step in (("scheduler", 2), ("learner", 4), ("scheduler", 6)):
                wait_until(lambda s=step, r=run: newest_step(r) >= s, timeout_s=END_S, what=f"step {step}")  # type: ignore[misc]
                kill_part(process, run, victim)
        began = time.monotonic()
        output, _ = process.communicate(timeout=END_S)
        assert process.returncode == 0, (time.monotonic() - began, output)
        found.append(prompts_by_request(run))
    whole, killed = found
    assert len(whole) == 8 * NUM_STEPS
    assert killed == whole
    uniform_order = list(whole.values())
    assert len(set(uniform_order)) < len(uniform_order), "no prompt was chosen twice: nothing was learnt"
