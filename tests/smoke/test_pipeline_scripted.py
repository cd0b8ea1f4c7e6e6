"""The real launcher with real Redis, buffer service, Ray fleet (scripted engine) and learner: one small run, whole."""

from __future__ import annotations

import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bapo.config.load import load_resolved
from bapo.records import RunDirectory
from tests.launching import alive, family, kill_family, start, train_arguments
from tests.patience import PATIENCE_S, wait_until
from tests.small_disk import fill

START_S = 120.0
"""Ray and torch on two shared cores."""


Start = Callable[[list[str]], subprocess.Popen[str]]


@pytest.fixture
def started() -> Iterator[Start]:
    """Starts commands and leaves nothing of them behind."""
    processes: list[subprocess.Popen[str]] = []

    def start_one(arguments: list[str]) -> subprocess.Popen[str]:
        processes.append(start(arguments))
        return processes[-1]

    yield start_one
    for process in processes:
        kill_family(process)


def run_at(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "outputs" / "run")


def wait_for_step(run: RunDirectory, step: int, process: subprocess.Popen[str]) -> None:
    def has_step() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return any(row["step"] >= step for row in run.read_metrics())

    wait_until(has_step, timeout_s=START_S, what=f"step {step}")


def secrets_of(run: RunDirectory) -> list[str]:
    """The tokens of the six roles and the password of the embedded Redis."""
    tokens = [path.read_text().strip() for path in (run.path / "tokens").glob("*/token")]
    config = (run.redis_path / "redis.conf").read_text()
    return [*tokens, config.partition("requirepass ")[2].split()[0]]


def written_by(run: RunDirectory) -> Iterator[str]:
    """Everything in the run directory that anybody but its owner can read."""
    for path in run.path.rglob("*"):
        if path.is_file() and path.stat().st_mode & 0o077 and run.redis_path not in path.parents:
            yield path.read_bytes().decode("latin-1")


def test_a_run_ends_with_everything_on_disk_and_nothing_left_running(started: Start, tmp_path: Path) -> None:
    page = ("--dashboard.enabled", "true", "--dashboard.port", "0", "--supervision.max_restarts", "0")
    process = started(train_arguments(tmp_path, *page, num_steps=4))
    run = run_at(tmp_path)
    wait_for_step(run, 1, process)
    members = family(process)
    (page_server,) = (member for member in members if "services.dashboard" in member.cmdline())
    url = run.read_run()["addresses"]["dashboard_url"]
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as reply:
        assert b"importmap" in reply.read()
    page_server.kill()  # and nothing else ends
    secrets, arguments = secrets_of(run), [" ".join(member.cmdline()) for member in members]
    output, _ = process.communicate(timeout=START_S)
    assert process.returncode == 0, output
    assert alive(members) == []
    assert len(secrets) == 7
    for told in (output, *arguments, *written_by(run)):
        assert not [secret for secret in secrets if secret in told], told[:200]

    rows = run.read_metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["x1"] + row["x2"] + row["x3"] <= 8 for row in rows)
    assert run.group_steps() == [1, 2, 3, 4]
    fresh = [fate for _, fates in run.read_groups() for fate in fates if fate.group_id.startswith("fresh-")]
    assert {fate.group_id for fate in fresh} == {f"fresh-{i:08d}" for i in range(32)}  # B = 8 in each of 4 steps
    measured = {(row["split"], row["version"]) for row in run.read_evaluations()}
    assert {("cd34", 1), ("cd4", 1), ("cd34", 5), ("cd4", 5)} <= measured
    assert run.checkpoint_steps()[-1] == 4
    assert "importmap" in run.report_path.read_text()
    assert load_resolved(run.config_path).algorithm.batch_size == 8

    fields = run.read_run()
    assert (fields["status"], fields["exit_code"]) == ("finished", 0)
    assert set(fields["processes"]) == {
        "redis", "buffer_service", "rollout_server", "learner", "scheduler", "evaluator", "dashboard",
    }  # fmt: skip
    assert all(run.log_path(name).exists() for name in fields["processes"])
    for words in (
        "rollout_server is ready after",
        f"dashboard  {url}",
        "the run continues without it",
        "step 4/4",
        "held-out cd34 at step 4",
        "run is finished",
    ):
        assert words in output


def end_by(number: signal.Signals, process: subprocess.Popen[str], run: RunDirectory) -> None:
    """What a user sees who has had enough."""
    members = family(process)
    began = time.monotonic()
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 10.0
    assert process.returncode == 130
    assert alive(members) == []
    assert f"bapo train --resume {run.path}" in output
    assert run.read_run()["status"] == "interrupted"


def test_ctrl_c_ends_a_run_within_ten_seconds_and_says_how_to_go_on(started: Start, tmp_path: Path) -> None:
    process = started(train_arguments(tmp_path, num_steps=100_000))
    wait_for_step(run_at(tmp_path), 2, process)
    end_by(signal.SIGINT, process, run_at(tmp_path))


def test_kill_9_of_the_launcher_leaves_nothing_running(started: Start, tmp_path: Path) -> None:
    process = started(train_arguments(tmp_path, num_steps=100_000))
    wait_for_step(run_at(tmp_path), 1, process)
    members = family(process)
    assert len(members) > 6
    process.send_signal(signal.SIGKILL)
    wait_until(lambda: alive(members) == [], what=f"end of {alive(members)}")


def kill_part(process: subprocess.Popen[str], run: RunDirectory, name: str) -> int:
    """SIGKILL to one process of a run that is under way; returns its id."""
    wait_until(lambda: run.read_run().get("status") == "running", what="run.json says running")
    pid = run.read_run()["processes"][name]["pid"]
    next(member for member in family(process) if member.pid == pid).kill()
    return int(pid)


@pytest.mark.parametrize("victim", ["learner", "rollout_server", "redis"])
def test_without_restarts_a_part_that_dies_ends_the_run_with_its_name(
    started: Start, tmp_path: Path, victim: str
) -> None:
    process = started(train_arguments(tmp_path, "--supervision.max_restarts", "0", num_steps=100_000))
    run = run_at(tmp_path)
    wait_for_step(run, 1, process)
    members = family(process)
    kill_part(process, run, victim)
    output, _ = process.communicate(timeout=60)
    assert f"{victim} ended with signal SIGKILL" in output
    assert process.returncode == 137
    assert alive(members) == []
    fields = run.read_run()
    assert (fields["status"], fields["exit_code"]) == ("failed", 137)


def test_every_part_that_dies_starts_again_and_the_run_goes_on(started: Start, tmp_path: Path) -> None:
    process = started(train_arguments(tmp_path, "--supervision.first_pause_s", "0.1", num_steps=100_000))
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
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "redis ended with signal SIGKILL; it starts again in 0.1 s (restart 1, at most 5 within 600 s" in output
    steps = [row["step"] for row in run.read_metrics()]
    assert steps == list(range(1, len(steps) + 1))


def test_a_verifier_that_raises_stops_the_run_with_its_words(started: Start, tmp_path: Path) -> None:
    overrides = ["--task.reward", "tests.bad_rewards:raises", "--buffer.max_failures_in_a_row", "5"]
    process = started(train_arguments(tmp_path, *overrides))
    output, _ = process.communicate(timeout=START_S)
    assert process.returncode in (3, 5), output
    assert "the verifier fell over" in output


def test_a_verifier_that_hangs_is_killed_and_stops_the_run(started: Start, tmp_path: Path) -> None:
    overrides = [
        "--task.reward", "tests.bad_rewards:hangs", "--task.grading_timeout_s", "0.5",
        "--buffer.max_failures_in_a_row", "3",
    ]  # fmt: skip
    process = started(train_arguments(tmp_path, *overrides))
    output, _ = process.communicate(timeout=START_S)
    assert process.returncode in (3, 5), output
    assert "timeout" in output


def test_a_run_that_goes_on_can_be_scaled_but_not_started_a_second_time(started: Start, tmp_path: Path) -> None:
    process = started(train_arguments(tmp_path, num_steps=100_000))
    run = run_at(tmp_path)
    wait_for_step(run, 1, process)
    scaled, second = (
        started(["scale", str(run.path), "2"]),
        started(["train", "--resume", str(run.path)]),
    )
    output, _ = scaled.communicate(timeout=60)
    assert (scaled.returncode, "will have 2 rollout workers" in output) == (0, True), output
    output, _ = second.communicate(timeout=60)
    assert (second.returncode, "is in progress in another process" in output) == (2, True), output

    def samplers() -> set[str]:
        return {fate.worker_id for _, fates in run.read_groups(run.group_steps()[-3:]) for fate in fates}

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
    assert set(fields["addresses"]) == {"buffer_url", "fleet_url"}
    assert "redis" not in fields["processes"]
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "start a learner with: python -m learner" in output

    (tmp_path / "other").mkdir()
    second = started(train_arguments(tmp_path / "other", "--buffer.redis_url", redis_url))
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 2, output
    assert "already holds a run named 'run'" in output


def test_a_full_disk_ends_the_run_and_freed_space_lets_it_go_on(started: Start, small_disk: Path) -> None:
    process = started(train_arguments(small_disk, num_steps=100_000))
    run = run_at(small_disk)
    wait_for_step(run, 3, process)
    filler = small_disk / "filler"
    fill(filler)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output
    assert "No space left on device" in output
    assert f"bapo train --resume {run.path}" in output

    step = run.latest_checkpoint()
    assert step is not None
    filler.unlink()
    resumed = started(["train", "--resume", str(run.path)])
    wait_for_step(run, step + 3, resumed)
    end_by(signal.SIGINT, resumed, run)
    steps = [row["step"] for row in run.read_metrics()]
    assert steps == list(range(1, len(steps) + 1))


def test_a_launcher_killed_before_the_first_checkpoint_trains_the_same_groups_after_a_resume(
    started: Start, tmp_path: Path
) -> None:
    process = started(train_arguments(tmp_path, "--checkpoint.every", "1000", num_steps=1000))
    run = run_at(tmp_path)
    wait_for_step(run, 2, process)
    below = family(process)
    process.kill()
    process.wait()
    wait_until(lambda: not alive(below), what="its children are gone")
    assert run.latest_checkpoint() is None

    def trained() -> list[tuple[object, ...]]:
        groups = [(fate.group_id, fate.origin, fate.rewards) for _, fates in run.read_groups([1, 2]) for fate in fates]
        return [(row["reward_mean"], row["loss"], row["num_tokens"]) for row in run.read_metrics()[:2]] + groups

    before, killed_at = trained(), time.time()
    resumed = started(["train", "--resume", str(run.path)])
    wait_until(
        lambda: any(row["step"] == 2 and row["time"] > killed_at for row in run.read_metrics()),
        timeout_s=START_S, what="step 2 again",
    )  # fmt: skip
    assert trained() == before
    end_by(signal.SIGINT, resumed, run)


def test_a_run_with_a_generation_budget_trains_responses_of_several_versions(started: Start, tmp_path: Path) -> None:
    budget = {
        "rollout.max_response_tokens": 24, "rollout.generation_budget": 8, "cadence.v": 1, "cadence.m": 1,
        "cadence.slack": 3, "evaluation.every": 0, "learner.microbatch_tokens": 256,
    }  # fmt: skip
    overrides = [token for key, value in budget.items() for token in (f"--{key}", str(value))]
    process = started(train_arguments(tmp_path, *overrides, num_steps=6))
    output, _ = process.communicate(timeout=2 * START_S)
    assert process.returncode == 0, output
    run = run_at(tmp_path)
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    mixed = [row for row in rows if "staleness_tokens_mean" in row]
    assert mixed, "no batch had a response of several versions"
    assert all(0 <= row["staleness_tokens_mean"] <= 3 for row in mixed)
    assert all(row["staleness_x1_max"] <= 3 for row in rows if row["x1"])
