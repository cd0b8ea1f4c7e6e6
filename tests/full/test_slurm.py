"""deploy/slurm/bapo.sbatch on a Slurm of three nodes, which are slurmd processes of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.launch import REPOSITORY
from tests.support.slurm import Slurm, is_installed
from tests.support.wait import wait_until

pytestmark = pytest.mark.skipif(not is_installed(), reason="needs slurmctld, slurmd and slurm-client")
TIMEOUT_S = 240.0
NUM_STEPS = 10
SETTINGS = [
    str(REPOSITORY / "deploy/configs/smoke.toml"),
    *("--model.path", str(REPOSITORY / "models/countdown-tiny"), "--run.num_steps", str(NUM_STEPS)),
    *("--rollout.engine_options", "{latency_s = 0.4}", "--evaluation.every", "0"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm"), 3) as running:
        yield running


def wait_for_step(slurm: Slurm, run: RunDirectory, step: int, job: str) -> None:
    def has_step() -> bool:
        assert slurm.facts(job)["JobState"] in ("PENDING", "RUNNING"), slurm.log(run.name, job)
        return run.path.exists() and len(run.read_metrics()) >= step

    wait_until(has_step, timeout_s=TIMEOUT_S, what=f"step {step}")


def test_a_job_is_requeued_at_its_time_limit_and_trains_the_missing_steps(slurm: Slurm, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "late")
    job = slurm.submit("late", 1, *SETTINGS, RUN=str(run.path))
    wait_for_step(slurm, run, 4, job)
    slurm.command("scancel", "--batch", "--signal=USR1", job)  # as `#SBATCH --signal` asks for, before the time limit
    wait_until(lambda: slurm.facts(job)["Restarts"] == "1", timeout_s=TIMEOUT_S, what="the requeued job")
    assert run.read_run()["status"] == "interrupted"
    assert slurm.end(job, TIMEOUT_S) == "COMPLETED 0:0", slurm.log("late", job)
    assert [row["step"] for row in run.read_metrics()] == list(range(1, NUM_STEPS + 1))
    assert "from the checkpoint of step" in slurm.log("late", job)
    wait_until(lambda: slurm.processes_of(job) == [], what=f"end of {slurm.processes_of(job)}")


def test_two_nodes_learn_and_one_samples_until_they_are_cancelled_and_when_they_are_submitted_again(
    slurm: Slurm, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "hosts")
    variables = {"LEARNER_NODES": "2", "RUN": str(run.path)}
    settings = [*SETTINGS, "--rollout.engine", "scripted_actor", "--learner.num_ranks", "2"]
    job = slurm.submit("hosts", 3, *settings, **variables)
    wait_for_step(slurm, run, 4, job)
    slurm.command("scancel", job)
    assert slurm.end(job, TIMEOUT_S).startswith("CANCELLED")
    wait_until(lambda: slurm.processes_of(job) == [], timeout_s=60, what=f"end of {slurm.processes_of(job)}")
    assert run.read_run()["status"] == "interrupted"

    job = slurm.submit("hosts", 3, *settings, **variables)
    assert slurm.end(job, TIMEOUT_S) == "FAILED 2:0"
    assert "keeps its settings: submit without arguments to resume it" in slurm.log("hosts", job)

    job = slurm.submit("hosts", 3, **variables)
    assert slurm.end(job, TIMEOUT_S) == "COMPLETED 0:0", slurm.log("hosts", job)
    assert [row["step"] for row in run.read_metrics()] == list(range(1, NUM_STEPS + 1))
    assert "[rank 1] " in slurm.log("hosts", job)  # only `python -m learner` on the second node says so
    wait_until(lambda: slurm.processes_of(job) == [], timeout_s=60, what=f"end of {slurm.processes_of(job)}")


def test_the_exit_code_of_the_run_is_that_of_the_job(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.submit("wrong", 1, *SETTINGS, "--learner.lr", "-1", RUN=str(tmp_path / "wrong"))
    assert slurm.end(job, TIMEOUT_S) == "FAILED 2:0", slurm.log("wrong", job)
    assert "learner.lr" in slurm.log("wrong", job)
