"""A real Ray cluster of three hosts that trains, loses a host, and gets it back. Root; docs/cluster.md has the figures.

    sudo python -m benchmarks.multi_host --engine vllm --out multi_host.json
    sudo python -m benchmarks.multi_host --engine scripted_actor --steps 8 --keep /tmp/hosts

    host 1: Redis, buffer service, learner, scheduler, rollout server, head of the Ray cluster (no room for workers)
    host 2, host 3: `ray start` under a restarter, room for one worker each; they see nothing of the run directory

Phases: both workers sample; the cable of host 3 is pulled, and plugged in again; the run is ended. Checked at the end:
steps without a gap, no group trained twice as fresh, exactly B fresh groups in each, and the buffer's own audit.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from bapo.core.types import GroupResult, Purpose
from bapo.runtime.run_directory.layout import RunDirectory
from benchmarks.multi_host.hosts import Hosts, address

REPOSITORY = Path(__file__).resolve().parents[2]
HEAD, FAR = 1, 3
"""Host 3 is the one that is cut off."""
RAY_PORT = 6379
HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
}
"""Ray's own answer to a host that is gone takes half a minute and more."""
WORKER_HOST = """
while true; do
  ray start --address {head}:{port} --node-ip-address {own} --num-cpus 2 --resources '{{"rollout": 1}}' \
    --object-store-memory 83886080 --block
  echo "the node ended; it starts again"; sleep 1
done
"""
HEAD_HOST = """
ray start --head --node-ip-address {head} --port {port} --num-cpus 0 --object-store-memory 83886080 \
  --include-dashboard false --block &
until ray health-check --address {head}:{port} 2>/dev/null; do sleep 1; done
RAY_ADDRESS={head}:{port} exec {python} -m bapo.cli {arguments}
"""
POLL_S = 0.2


@dataclass
class Figures:
    """Seconds, unless the name says otherwise."""

    engine: str = ""
    first_step_s: float = 0.0
    """From the start of the first process."""
    steps_before: int = 0
    step_s_before: float = 0.0
    """Median of the steps with both workers."""
    dead_after_s: float = 0.0
    """From the pulled cable until the fleet buried the worker and gave its claims back."""
    step_s_without: float = 0.0
    back_after_s: float = 0.0
    """From the cable until the worker sampled again."""
    step_s_after: float = 0.0
    longest_step_s: float = 0.0
    num_steps: int = 0
    fresh_by_worker: dict[str, int] | None = None
    weights_fetched: int = 0
    """Copies that hosts 2 and 3 fetched."""
    problems: list[str] | None = None


class Trial:
    """One run from start to end."""

    def __init__(self, hosts: Hosts, folder: Path, engine: str, patience_s: float) -> None:
        self._hosts, self._folder, self._patience_s = hosts, folder, patience_s
        self.figures = Figures(engine=engine)
        root = folder / "outputs"
        root.mkdir()
        self.run = RunDirectory(root / "run")
        self._began = time.monotonic()
        self._env = os.environ | HEALTH
        self._env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
        self._env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
        self._head = self._start_head(root, engine)
        for i in (2, FAR):
            own = folder / f"host-{i}"
            own.mkdir()
            script = WORKER_HOST.format(head=address(HEAD), port=RAY_PORT, own=address(i))
            log = folder / f"host-{i}.log"
            hosts.start(i, ["bash", "-c", script], env=self._env, log=log, binds={own: root})

    def _start_head(self, root: Path, engine: str) -> subprocess.Popen[bytes]:
        is_model = engine == "vllm"
        base = REPOSITORY / "deploy/configs" / ("demo.toml" if is_model else "smoke.toml")
        settings = {
            "run.name": "run", "run.root": root, "run.num_steps": 100_000, "algorithm.batch_size": 16,
            "learner.minibatch_size": 8, "checkpoint.every": 10, "evaluation.every": 0,
            "evaluation.num_prompts_final": 4, "buffer.host": address(HEAD), "buffer.lease_s": 30,
            "rollout.host": address(HEAD), "rollout.engine": engine, "rollout.num_workers": 2,
            "rollout.max_workers": 2, "rollout.max_groups_in_flight": 8, "rollout.weights_cache": root / "weights-here",
            "rollout.worker_resources": "{rollout = 1}", "rollout.start_timeout_s": 600,
        }  # fmt: skip
        if not is_model:
            settings["rollout.engine_options"] = "{latency_s = 1.0}"
        words = " ".join(f"--{key} '{value}'" for key, value in settings.items())
        script = HEAD_HOST.format(
            head=address(HEAD), port=RAY_PORT, python=sys.executable, arguments=f"train {base} {words}"
        )
        return self._hosts.start(HEAD, ["bash", "-c", script], env=self._env, log=self._folder / "host-1.log")

    def both_sample(self, steps: int) -> None:
        """Until `steps` steps have groups of both workers."""
        self._wait(lambda: self._rows() >= 1, "the first step")
        self.figures.first_step_s = round(time.monotonic() - self._began, 1)
        self._wait(lambda: min(map(len, self._steps_of("worker-0", "worker-1"))) >= steps, "steps with both workers")
        self.figures.steps_before = self._rows()
        self.figures.step_s_before = self._median(0)

    def cut(self, steps: int) -> None:
        """Pull the cable; the other worker goes on."""
        self._hosts.cut(FAR)
        began, before = time.monotonic(), self._rows()
        self._wait(lambda: self._said(" died: "), "the fleet notices that a worker is gone")
        self.figures.dead_after_s = round(time.monotonic() - began, 1)
        self._wait(lambda: self._rows() >= before + steps, f"{steps} steps with one worker")
        self.figures.step_s_without = self._median(before + 1)

    def heal(self, steps: int) -> None:
        """Plug it in; a new worker takes the place of the lost one."""
        before_ready = self._said(" is ready with version")
        self._hosts.heal(FAR)
        began = time.monotonic()
        self._wait(lambda: self._said(" is ready with version") > before_ready, "a worker on the host that came back")
        self.figures.back_after_s = round(time.monotonic() - began, 1)
        before = self._rows()
        # Not only steps: what the other worker has sampled ahead may fill the first ones.
        self._wait(lambda: len(self._steps_of_newcomers()) >= steps, f"{steps} steps with groups of the new worker")
        self._wait(lambda: self._rows() >= before + steps, f"{steps} steps with both again")
        self.figures.step_s_after = self._median(before + 1)

    def end(self) -> None:
        """Audit, end the run, check its records."""
        audit = self._inside("buffer", "verify", str(self.run.path))
        self._inside_signal()
        self._wait(lambda: self._head.poll() is not None, "the end of the run")
        rows = self.run.read_metrics()
        self.figures.num_steps = len(rows)
        self.figures.longest_step_s = round(max(row["step_s"] for row in rows), 1)
        fresh = consumed(self.run)
        self.figures.fresh_by_worker = dict(Counter(result.worker_id for _, result in fresh))
        copies = self._folder.glob("host-*/run/logs/*.log")
        self.figures.weights_fetched = sum(path.read_text(errors="replace").count("fetched weights") for path in copies)
        self.figures.problems = problems(rows, fresh, batch_size=16) + ([] if audit == "" else [audit])

    def _inside(self, *words: str) -> str:
        """A command of ours on host 1; empty when it succeeds, else what it said."""
        log = self._folder / "command.log"
        command = [sys.executable, "-m", "bapo.cli", *words]
        done = self._hosts.start(HEAD, command, env=self._env, log=log)
        return "" if done.wait(self._patience_s) == 0 else log.read_text()[-2000:]

    def _inside_signal(self) -> None:
        """Ctrl-C, as a user gives it, to the launcher, whose process id here is not the one on its host."""
        import psutil

        for process in psutil.Process(self._head.pid).children(recursive=True):
            if "services.launcher" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGINT)
                return

    def _rows(self) -> int:
        return len(self.run.read_metrics()) if self.run.path.exists() else 0

    def _steps_of(self, *places: str) -> list[set[int]]:
        """The steps in which each place's workers have groups."""
        found: dict[str, set[int]] = {place: set() for place in places}
        for step, results in self.run.read_groups():
            for result in results:
                found[result.worker_id.partition(".")[0]].add(step)
        return list(found.values())

    def _steps_of_newcomers(self) -> set[int]:
        """The steps that have groups of a worker that took the place of another."""
        return {step for step, results in self.run.read_groups() for result in results if "." in result.worker_id}

    def _median(self, first: int) -> float:
        seconds = sorted(row["step_s"] for row in self.run.read_metrics()[first:])
        return round(seconds[len(seconds) // 2], 2)

    def _said(self, words: str) -> int:
        log = self.run.log_path("rollout_server")
        return log.read_text(errors="replace").count(words) if log.exists() else 0

    def _wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + self._patience_s
        while not condition():
            if self._head.poll() is not None and what != "the end of the run":
                raise SystemExit(f"the run ended before {what}: {self._tail()}")
            if time.monotonic() > deadline:
                raise SystemExit(f"not within {self._patience_s:.0f} s: {what}; {self._tail()}")
            time.sleep(POLL_S)
        print(f"{time.monotonic() - self._began:7.1f} s  {what}", flush=True)

    def _tail(self) -> str:
        logs = [self._folder / "host-1.log", self.run.log_path("rollout_server")]
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in logs if path.exists())


def consumed(run: RunDirectory) -> list[tuple[int, GroupResult]]:
    """(step, group) of every fresh group that a batch took; what was too old by then was dropped and asked again."""
    found = [(step, result) for step, results in run.read_groups() for result in results]
    fresh = [(step, result) for step, result in found if result.purpose is Purpose.FRESH and result.birth == step]
    return [(step, result) for step, result in fresh if result.reason != "stale"]


def problems(rows: list[dict[str, object]], fresh: list[tuple[int, GroupResult]], *, batch_size: int) -> list[str]:
    """What must not be, in words; empty when nothing is wrong."""
    found = []
    steps = [row["step"] for row in rows]
    if steps != list(range(1, len(steps) + 1)):
        found.append(f"steps have gaps: {steps}")
    twice = [name for name, times in Counter(result.group_id for _, result in fresh).items() if times > 1]
    if twice:
        found.append(f"fresh in two steps: {twice[:5]}")
    sizes = Counter(step for step, _ in fresh)
    wrong = {step: number for step, number in sizes.items() if number != batch_size}
    if wrong:
        found.append(f"steps without {batch_size} fresh groups: {wrong}")
    return found


def main() -> int:
    """Run the trial, print and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["vllm", "scripted_actor"], default="vllm")
    parser.add_argument("--steps", type=int, default=10, help="steps of each phase")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for each wait")
    parser.add_argument("--keep", type=Path, help="folder for logs and records, which then stay")
    parser.add_argument("--out", type=Path, help="write the figures there")
    flags = parser.parse_args()
    folder = flags.keep or Path(tempfile.mkdtemp(prefix="bapo-hosts-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with Hosts(3) as hosts:
            trial = Trial(hosts, folder, flags.engine, flags.patience)
            trial.both_sample(flags.steps)
            trial.cut(flags.steps)
            trial.heal(flags.steps)
            trial.end()
    finally:
        if flags.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    shown = json.dumps(asdict(trial.figures), indent=2)
    print(shown)
    if flags.out:
        flags.out.write_text(shown + "\n")
    return 1 if trial.figures.problems else 0


if __name__ == "__main__":
    sys.exit(main())
