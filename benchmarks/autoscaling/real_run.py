"""A real run that scales itself, as a table: what the fleet did between two changes, and how long the learner waited.

    python -m benchmarks.autoscaling.real_run --steps 120

Real Redis, buffer service, learner, scheduler and rollout server; the scripted engine in threads. Groups take 1.5 s at
policy versions 1 to 39 and 75 ms from version 40 on.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from bapo.runtime.run_directory.layout import RunDirectory

REPOSITORY = Path(__file__).resolve().parents[2]
LINE = re.compile(
    r"^(\S+ \S+) .*autoscaling desired=(\d+) wanted=(\d+) ready=(\d+) reason=(\w+) need=(\S+) wait=(\S+) idle=(\S+)"
)
SETTINGS = {
    "run.name": "run", "algorithm.batch_size": 8, "learner.minibatch_size": 4, "cadence.max_steps_ahead": 3,
    "checkpoint.every": 50, "rollout.max_workers": 4, "rollout.max_groups_in_flight": 4, "evaluation.every": 0,
    "evaluation.num_prompts_final": 4, "autoscaling.actuator": "fleet", "autoscaling.window_s": 5,
    "autoscaling.up_cooldown_s": 5, "autoscaling.down_cooldown_s": 10, "autoscaling.max_workers": 4,
    "rollout.engine_options": "{latency_s = 0.075, slow_versions = [1, 39], slow_times = 20.0}",
}  # fmt: skip


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bapo-scaling-") as root:
        words = {**SETTINGS, "run.root": root, "run.num_steps": flags.steps}
        overrides = [word for key, value in words.items() for word in (f"--{key}", str(value))]
        command = [
            sys.executable,
            "-m",
            "bapo.cli",
            "train",
            str(REPOSITORY / "deploy/configs/smoke.toml"),
            *overrides,
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report(RunDirectory(Path(root) / "run"))


def report(run: RunDirectory) -> None:
    """One line per stretch of time with the same number of workers."""
    rows = run.read_metrics()
    began = min(row["time"] for row in rows)
    found = [
        match.groups() for match in map(LINE.match, run.log_path("rollout_server").read_text().splitlines()) if match
    ]
    changes = [
        (_unix(when), int(desired), reason) for when, desired, wanted, _, reason, *_ in found if desired != wanted
    ]
    edges = [(began, 1, "start"), *changes, (time.time(), 0, "")]
    print("| from, s | workers | because | steps | s per step | learner waits |\n|---|---|---|---|---|---|")
    for (since, workers, reason), (until, _, _) in pairwise(edges):
        part = [row for row in rows if since < row["time"] <= until]
        total = sum(row["step_s"] for row in part)
        waited = sum(row["wait_batch_s"] for row in part)
        step = f"{total / len(part):.2f} | {waited / total:.0%}" if part else "- | -"
        print(f"| {since - began:.0f} | {workers} | {reason} | {len(part)} | {step} |")


def _unix(when: str) -> float:
    return datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f").timestamp()  # the log is in local time


if __name__ == "__main__":
    main()
