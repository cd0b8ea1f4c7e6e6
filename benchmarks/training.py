"""Run `bapo train` from a benchmark and read what it left: every figure comes from a run directory."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo.runtime.run_directory.layout import RunDirectory

INTERRUPTED = 130
"""Exit code of a run that Ctrl-C or `bapo stop` ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """One run that ended with exit code 0."""

    run: RunDirectory
    started_at: float
    """Unix time at which the command was given."""
    wall_s: float
    """From then to its end."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row per step."""
        return self.run.read_metrics()

    def step_seconds(self, skip: int) -> list[float]:
        """Seconds between the ends of consecutive steps, without the first `skip`."""
        times = [row["time"] for row in self.metrics]
        return [after - before for before, after in zip(times[skip:], times[skip + 1 :], strict=False)]


def train(config: str, name: str, overrides: Sequence[str], *, root: Path) -> FinishedRun:
    """`bapo train config --run.name name ...` with its output in ROOT/NAME.txt.

    Raises: RuntimeError with the last lines when the run fails.
    """
    return _train([config, "--run.name", name, "--run.root", str(root), *overrides], name, root)


def resume(name: str, *, root: Path) -> FinishedRun:
    """`bapo train --resume ROOT/NAME`, as `train`. Its time is that of this start alone."""
    return _train(["--resume", str(root / name)], name, root)


def _train(arguments: Sequence[str], name: str, root: Path) -> FinishedRun:
    root.mkdir(parents=True, exist_ok=True)
    log_path = root / f"{name}.txt"
    started = time.time()
    with log_path.open("w") as log:
        command = [sys.executable, "-m", "bapo.cli", "train", *arguments]
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code != 0:
        tail = "\n".join(log_path.read_text().splitlines()[-10:])
        raise RuntimeError(f"{name} ended with exit code {code}:\n{tail}")
    return FinishedRun(run=RunDirectory.open(root / name), started_at=started, wall_s=time.time() - started)


def median(values: Sequence[float]) -> float:
    """Middle value, rounded to what a wall clock can tell."""
    return round(statistics.median(values), 4)
