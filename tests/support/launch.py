"""Start `bapo` commands as a user does: a small run directory, the real launcher, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.wait import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
FREE_PORTS = [
    token
    for section in ("buffer", "rollout", "learner", "scheduler", "evaluation", "dashboard")
    for token in (f"--{section}.port", "0")
]


START_S = 120.0
"""Until a run has begun: Ray and torch on two shared cores."""
Start = Callable[[Sequence[str]], subprocess.Popen[str]]
"""Of the fixture `started`."""


def train_arguments(tmp_path: Path, *overrides: str, name: str = "run", num_steps: int = 4) -> list[str]:
    """`bapo train` with the scripted engine and a random Llama of a few thousand parameters."""
    from tests.support.tiny_model import write_tiny_model  # here: it imports torch, and every test imports this module

    model = tmp_path / "model"
    if not model.exists():
        write_tiny_model(model)
    base = {
        "run.root": str(tmp_path / "outputs"), "run.name": name, "run.num_steps": num_steps,
        "model.path": str(model), "algorithm.batch_size": 8, "learner.minibatch_size": 4, "checkpoint.every": 2,
        "cadence.weight_sync_interval": 2, "cadence.reevaluation_interval": 2, "evaluation.every": 2,
        "evaluation.num_prompts": 4,
        "evaluation.num_prompts_final": 8,
    }  # fmt: skip
    tokens = [token for key, value in base.items() for token in (f"--{key}", str(value))]
    return ["train", str(REPOSITORY / "deploy/configs/smoke.toml"), *tokens, *FREE_PORTS, *overrides]


def start(arguments: Sequence[str], *, cwd: Path = REPOSITORY) -> subprocess.Popen[str]:
    """A `bapo` command with its output in a pipe; in a session of its own, as a terminal would give it."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "bapo.cli", *arguments],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_to_end(arguments: Sequence[str], *, timeout_s: float) -> str:
    """The output of a `bapo` command that must end with 0; nothing of it runs on."""
    process = start(arguments)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        kill_family(process)
    assert process.returncode == 0, output
    return output


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Every process below this one, in whatever session."""
    return psutil.Process(process.pid).children(recursive=True)


def alive(processes: Sequence[psutil.Process]) -> list[str]:
    """Command lines of those that still run."""
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:120])
        except psutil.NoSuchProcess:
            continue
    return found


def kill_family(process: subprocess.Popen[str]) -> None:
    """Whatever a failed test leaves: ended by process id."""
    if process.poll() is None:
        members = family(process)
        process.send_signal(signal.SIGKILL)
        for member in members:
            if member.is_running():
                member.kill()
    process.wait()
    if process.stdout:
        process.stdout.close()


def run_at(tmp_path: Path) -> RunDirectory:
    """The run directory of `train_arguments(tmp_path)`."""
    return RunDirectory(tmp_path / "outputs" / "run")


def wait_for_step(run: RunDirectory, step: int, process: subprocess.Popen[str]) -> None:
    """Return when the row of the step is on disk; fail with the output of a launcher that ended before."""

    def has_step() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return any(row["step"] >= step for row in run.read_metrics())

    wait_until(has_step, timeout_s=START_S, what=f"step {step}")


def end_by(number: signal.Signals, process: subprocess.Popen[str], run: RunDirectory) -> str:
    """Interrupt a run as a user does: it ends within ten seconds, leaves no process and prints how to resume."""
    members = family(process)
    began = time.monotonic()
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 10.0
    assert process.returncode == 130
    assert alive(members) == []
    assert f"bapo train --resume {run.path}" in output
    assert run.read_run()["status"] == "interrupted"
    return output
