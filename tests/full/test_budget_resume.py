"""A run whose responses are sampled in segments, killed with everything that it has and resumed: the same batches."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from bapo.core.types import Origin
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.launch import kill_family, start, train_arguments
from tests.support.wait import wait_until

WAIT_S = 240.0
NUM_STEPS = 14
BUDGETED = [
    # Up to three segments of 8 tokens; a checkpoint that lies some steps behind the kill.
    "--rollout.max_response_tokens", "24", "--rollout.generation_budget", "8",
    "--cadence.weight_sync_interval", "1", "--cadence.reevaluation_interval", "1", "--cadence.max_steps_ahead", "3",
    "--evaluation.every", "0", "--learner.microbatch_tokens", "256", "--checkpoint.every", "4",
    "--rollout.engine_options.latency_s", "0.05",
]  # fmt: skip


def items_by_step(run: RunDirectory) -> dict[int, list[tuple[str, Origin]]]:
    """What each step trained."""
    return {
        step: sorted((result.group_id, result.origin) for result in results if result.origin is not None)
        for step, results in run.read_groups()
    }


def steps_of_mixed_responses(run: RunDirectory) -> set[int]:
    """Steps that trained a response of several policy versions."""
    return {int(row["step"]) for row in run.read_metrics() if "staleness_tokens_mean" in row}


def test_a_killed_run_with_a_generation_budget_goes_on_with_the_same_batches(
    processes: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start(train_arguments(tmp_path, *BUDGETED, num_steps=NUM_STEPS))
    processes.append(process)
    run = RunDirectory(tmp_path / "outputs" / "run")

    def in_the_middle() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return bool(steps_of_mixed_responses(run)) and max(items_by_step(run)) >= 6

    wait_until(in_the_middle, timeout_s=WAIT_S, what="responses of several segments in step 6")
    kill_family(process)
    assert process.returncode == -signal.SIGKILL
    before = items_by_step(run)
    assert max(before) < NUM_STEPS

    resumed = start(["train", "--resume", str(run.path)])
    processes.append(resumed)
    output, _ = resumed.communicate(timeout=WAIT_S)
    assert resumed.returncode == 0, output
    after = items_by_step(run)
    assert list(after) == [row["step"] for row in run.read_metrics()] == list(range(1, NUM_STEPS + 1))
    assert {step: after[step] for step in before} == before
    assert max(steps_of_mixed_responses(run)) > max(before), "no response was sampled in segments after the kill"
    fresh = [group_id for items in after.values() for group_id, origin in items if origin == Origin.X1]
    assert len(set(fresh)) == len(fresh), "a fresh group trained twice"
    assert [path.name for path in (run.path / "segments").glob("fresh-*")] == []
