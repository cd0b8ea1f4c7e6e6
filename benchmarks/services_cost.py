"""What our services cost per step: wire, Redis, grading, records, against sampling and training themselves.

    pip install py-spy==0.4.3
    python -m benchmarks.services_cost --steps 60 --out services.json

Runs the `grpo` work of benchmarks/peer_trl and reads the CPU time of every process over the steady state from the
operating system. In the worker one thread owns the engine, some claim, grade and push, and the rest are Ray's: the
operating system counts their time apart too (py-spy tells which thread is which). The learner does everything in one
thread: py-spy says which share of its samples lies in our service code (files below), whatever was called from there.

Two sums: `services_ms` is wire, Redis, grading, records (buffer service, Redis, graders, scheduler, evaluator, and the
parts of worker and learner that talk to them); `all_ms` has the launcher, the fleet and Ray besides.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from bapo.core.errors import BapoError
from bapo.runtime.run_directory.layout import RunDirectory
from benchmarks.training import median, train

CONFIG = "benchmarks/peer_trl/grpo.toml"
KINDS = {
    "valkey-server": "redis",
    "redis-server": "redis",
    "buffer_service": "buffer service",
    "services.scheduler": "scheduler",
    "services.evaluator": "evaluator",
    "bapo.tasks.grading.process": "graders",
    "WorkerActor": "worker",
    "raylet": "ray",
    "gcs_server": "ray",
    "ray": "ray",
    "rollout_server": "fleet",
    "learner": "learner",
    "services.launcher": "launcher",
}
"""What a command line holds -> the process. The first that fits counts."""
WORKER_THREADS = {
    "sampler": "engine",
    "claim": "worker: claim, grade, push",
    "renew": "worker: claim, grade, push",
    "push": "worker: claim, grade, push",
    "grade-0": "worker: claim, grade, push",
    "grade-1": "worker: claim, grade, push",
}
"""Name of a thread of the worker -> part; all other threads are Ray's."""
TRAINING = ("engine", "learner")
UPKEEP = ("launcher", "fleet", "ray", "worker: Ray")
SERVICE_FILES = (
    "bapo/core/codec.py",
    "bapo/core/frames.py",
    "bapo/core/codec.py",
    "bapo/transport/messages.py",
    "bapo/transport/service_client.py",
    "bapo/transport/buffer_client.py",
    "bapo/runtime/run_directory/layout.py",
    "bapo/runtime/run_directory/files.py",
    "bapo/runtime/metrics/server.py",
    "bapo/transport/rollout_client.py",
)  # fmt: skip
WARM_STEPS = 10
RATE_HZ = 100


def kind_of(process: psutil.Process) -> str:
    """Which part of the system a process is."""
    line = " ".join(process.cmdline())
    return next((kind for words, kind in KINDS.items() if words in line), "other")


def cpu_seconds(root: psutil.Process, names: dict[int, str]) -> dict[str, dict[int, float]]:
    """Part -> id -> CPU seconds so far, of a process and all below it. Ids are those of processes, in the worker of
    threads, whose names are in `names`."""
    seconds: dict[str, dict[int, float]] = {}
    for process in (root, *root.children(recursive=True)):
        kind = kind_of(process)
        if kind == "worker":
            for thread in process.threads():
                part = WORKER_THREADS.get(names.get(thread.id, ""), "worker: Ray")
                seconds.setdefault(part, {})[thread.id] = thread.user_time + thread.system_time
        else:
            times = process.cpu_times()
            seconds.setdefault(kind, {})[process.pid] = times.user + times.system
    return seconds


def py_spy(*arguments: str) -> list[str]:
    """The command, from this environment."""
    return [str(Path(sys.executable).parent / "py-spy"), *arguments]


def thread_names(pid: int) -> dict[int, str]:
    """Id of the operating system -> name, of the Python threads of a process."""
    shown = subprocess.run(py_spy("dump", "--json", "--pid", str(pid)), capture_output=True, check=True).stdout
    return {int(thread["os_thread_id"]): thread["thread_name"] for thread in json.loads(shown)}


def service_share(stacks: Path) -> float:
    """Share of a py-spy recording's samples that lie in our service code. Lines: `frame;frame;... count`."""
    ours = total = 0
    for line in stacks.read_text().splitlines():
        frames, _, count = line.rpartition(" ")
        total += int(count)
        ours += int(count) * any(file in frames for file in SERVICE_FILES)
    return ours / total


class Observer:
    """Watches one run from its step `WARM_STEPS` on; read its figures after the run."""

    def __init__(self, run: Path, num_steps: int) -> None:
        self._run, self._num_steps = run, num_steps
        self.cpu_s: dict[str, float] = {}
        self.wall_s = 0.0
        self.steps = 0
        self.stacks = run.parent / f"{run.name}.learner.stacks"
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Begin to look for the run."""
        self._thread.start()

    def join(self) -> None:
        """The run has ended."""
        self._thread.join()

    def _num_done(self) -> int:
        try:
            return len(RunDirectory.open(self._run).read_metrics())
        except (BapoError, OSError):
            return 0

    def _watch(self) -> None:
        while self._num_done() < WARM_STEPS:
            time.sleep(0.1)
        root = next(child for child in psutil.Process().children() if kind_of(child) == "launcher")
        pids = {kind_of(process): process.pid for process in root.children(recursive=True)}
        names = thread_names(pids["worker"])
        before, first, first_step = cpu_seconds(root, names), time.time(), self._num_done()
        spy = self._spy(pids["learner"])
        while self._num_done() < self._num_steps - 2:
            time.sleep(0.1)
        after, self.wall_s, self.steps = cpu_seconds(root, names), time.time() - first, self._num_done() - first_step
        spy.wait()
        for part, seconds in after.items():
            self.cpu_s[part] = sum(s - before.get(part, {}).get(i, 0.0) for i, s in seconds.items())

    def _spy(self, pid: int) -> subprocess.Popen[bytes]:
        command = py_spy("record", "--pid", str(pid), "--format", "raw", "--full-filenames", "--duration", "20")
        command += ["--rate", str(RATE_HZ), "--output", str(self.stacks)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def observe(name: str, steps: int, root: Path) -> dict[str, Any]:
    """One run: CPU milliseconds per step of every part, and the share of what is ours."""
    observer = Observer(root / name, steps)
    observer.start()
    train(CONFIG, name, ["--run.num_steps", str(steps)], root=root)
    observer.join()
    step_ms = 1000 * observer.wall_s / observer.steps
    parts = {part: 1000 * seconds / observer.steps for part, seconds in observer.cpu_s.items()}
    parts["learner: wire, waiting, records"] = parts["learner"] * service_share(observer.stacks)
    parts["learner"] -= parts["learner: wire, waiting, records"]
    everything = sum(ms for part, ms in parts.items() if part not in TRAINING)
    services = sum(ms for part, ms in parts.items() if part not in TRAINING + UPKEEP)
    return {
        "steps": observer.steps,
        "step_ms": step_ms,
        "cpu_ms_per_step": parts,
        "services_ms": services,
        "services_share_of_two_cores": services / (2 * step_ms),
        "all_ms": everything,
        "all_share_of_two_cores": everything / (2 * step_ms),
    }


def rounded(value: Any) -> Any:
    """For people."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path("outputs/services-cost"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rounds = [observe(f"round-{index}", args.steps, args.root) for index in range(args.rounds)]
    keys = ("step_ms", "services_ms", "services_share_of_two_cores", "all_ms", "all_share_of_two_cores")
    medians = {key: median([entry[key] for entry in rounds]) for key in keys}
    result = rounded({"medians": medians, "rounds": rounds})
    args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
