"""The real launcher with real Redis, buffer service, Ray fleet (scripted engine) and learner: one small run, whole."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.support.launch import (
    START_S,
    Start,
    alive,
    end_by,
    family,
    run_at,
    train_arguments,
    wait_for_step,
)
from tests.support.wait import wait_until


def test_kill_9_of_the_launcher_leaves_nothing_running(started: Start, tmp_path: Path) -> None:
    process = started(train_arguments(tmp_path, num_steps=100_000))
    wait_for_step(run_at(tmp_path), 1, process)
    members = family(process)
    assert len(members) > 6
    process.send_signal(signal.SIGKILL)
    wait_until(lambda: alive(members) == [], what=f"end of {alive(members)}")


def test_a_verifier_that_raises_stops_the_run_with_its_words(started: Start, tmp_path: Path) -> None:
    overrides = [
        "--task.reward",
        "tests.support.bad_rewards:raises",
        "--task.check_gold",
        "false",
        "--buffer.max_failures_in_a_row",
        "5",
    ]
    process = started(train_arguments(tmp_path, *overrides))
    output, _ = process.communicate(timeout=START_S)
    assert process.returncode in (3, 5), output
    assert "the verifier fell over" in output


def test_a_running_run_can_be_scaled_but_not_started_a_second_time(started: Start, tmp_path: Path) -> None:
    process = started(train_arguments(tmp_path, num_steps=100_000))
    run = run_at(tmp_path)
    wait_for_step(run, 1, process)
    scaled, second = (
        started(["scale", str(run.path), "2"]),
        started(["train", "--resume", str(run.path)]),
    )
    output, _ = scaled.communicate(timeout=60)
    assert (scaled.returncode, "target is 2 rollout workers" in output) == (0, True), output
    output, _ = second.communicate(timeout=60)
    assert (second.returncode, "is already running in another process" in output) == (2, True), output

    def samplers() -> set[str]:
        return {result.worker_id for _, results in run.read_groups(run.group_steps()[-3:]) for result in results}

    wait_until(lambda: len(samplers()) >= 2, what="groups of two workers")
    end_by(signal.SIGTERM, process, run)


def test_services_come_up_without_a_learner_and_a_shared_redis_keeps_names_apart(
    started: Start, tmp_path: Path, redis_url: str
) -> None:
    arguments = train_arguments(tmp_path, "--buffer.redis_url", redis_url)
    process = started(["up", *arguments[1:]])
    run = run_at(tmp_path)
    wait_until(lambda: run.read_run().get("status") == "running", timeout_s=START_S, what="services are up")
    fields = run.read_run()
    assert set(fields["addresses"]) == {"buffer_url", "rollout_url"}
    assert "redis" not in fields["processes"]
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "start a learner with: python -m learner" in output

    (tmp_path / "other").mkdir()
    second = started(train_arguments(tmp_path / "other", "--buffer.redis_url", redis_url))
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 2, output
    assert "already has a run named 'run'" in output
