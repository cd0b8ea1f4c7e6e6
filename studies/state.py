"""What there is of each run of a study: its state on disk, its line of results.jsonl.

NEW ----start----> FINISHED   kept, never made again
           |
           +--broken--> RESUME (from its checkpoint) or RESTART (no checkpoint: from step 1, in the same directory)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from bapo.config.load import diff, load_resolved
from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.files import append_line, keep_lines, read_lines
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.rows import ResultRow
from studies.ledger import ledger_of
from studies.plan import PlannedRun

FINISHED = "finished"
MOVED = ("run.root", "dashboard.port", "rollout.sync_timeout_s", "learner.batch_timeout_s", "buffer.max_memory_mb")
"""Settings that may differ from those on disk: where a study lies says nothing of it, nor does when a run gives up."""


class State(StrEnum):
    NEW = "new"
    RESUME = "resume"
    RESTART = "restart"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    run: PlannedRun
    state: State
    step: int = 0
    before: str = ""
    """How the last attempt ended, as run.json says it."""

    @property
    def share_left(self) -> float:
        return 0.0 if self.state is State.FINISHED else 1.0 - self.step / self.run.config.run.num_steps

    def __str__(self) -> str:
        was = f" (it was {self.before})" if self.before else ""
        if self.state is State.RESUME:
            return f"{self.run.name}: resumed from its checkpoint after step {self.step}{was}"
        if self.state is State.RESTART:
            return f"{self.run.name}: restarted at step 1, it had no checkpoint yet{was}"
        return f"{self.run.name}: {'finished, kept' if self.state is State.FINISHED else 'started'}"


def inspect_run(run: PlannedRun) -> StudyRun:
    if not (run.path / "config.toml").is_file():
        return StudyRun(run=run, state=State.NEW)
    directory = RunDirectory.open(run.path)
    fields = directory.read_run()
    step = directory.latest_checkpoint() or 0
    if fields.get("status") == FINISHED:
        return StudyRun(run=run, state=State.FINISHED, step=step)
    # A status like `running` of a process that is gone was true until it was killed.
    before = "" if not fields else str(fields.get("status", "killed"))
    before = before if before in ("failed", "interrupted") else "killed" if fields else ""
    return StudyRun(run=run, state=State.RESUME if step else State.RESTART, step=step, before=before)


def changed(runs: Iterable[PlannedRun]) -> None:
    """Refuse runs on disk that were made with other settings than the file says now: they would be compared as one.

    Raises: ConfigError with one line per run.
    """
    problems = []
    for run in runs:
        path = run.path / "config.toml"
        if not path.is_file():
            continue
        lines = [line for line in diff(load_resolved(path), run.config) if line.partition(":")[0] not in MOVED]
        if lines:
            problems.append(
                f"{run.path} has different settings than the study: {'; '.join(lines)}; restore them, "
                "rename the study, or delete that run"
            )
    if problems:
        raise ConfigError("\n".join(problems))


class Results:
    """The file. The study is its only writer."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "results.jsonl"

    def read(self) -> list[dict[str, Any]]:
        return read_lines(self.path, ResultRow)

    def remember(self, run: PlannedRun, *, exit_code: int, reason: str, wall_s: float, is_new: bool) -> dict[str, Any]:
        """Replace the line of a run that has ended just now; returns it.

        Args:
            is_new: whether nothing was there of the run before this start.
        Raises: StorageError.
        """
        before = [row for row in self.read() if row["run"] == run.name]
        directory = RunDirectory.open(run.path) if (run.path / "config.toml").is_file() else None
        status = str(directory.read_run().get("status", "failed")) if directory else "failed"
        if exit_code and status == FINISHED:
            status = "failed"
        row: dict[str, Any] = {
            "method": run.method,
            "seed": run.seed,
            "run": run.name,
            "status": status,
            "exit_code": exit_code,
            "reason": reason,
            "starts": 1 + sum(int(row["starts"]) for row in before),
            "in_one_start": is_new and not before,
            "wall_s": round(wall_s + sum(float(row["wall_s"]) for row in before), 1),
        }
        if directory and status == FINISHED:
            row |= {"commit": directory.read_run().get("commit"), **outcome(directory)}
        keep_lines(self.path, lambda line: line["run"] != run.name)
        append_line(self.path, row)
        return row


def outcome(run: RunDirectory) -> dict[str, Any]:
    metrics, evaluations = run.read_metrics(whole=True), run.read_evaluations(whole=True)
    spent = ledger_of(run.read_groups(), evaluations, metrics)
    purposes = {"fresh": spent.fresh, "reevaluate": spent.reevaluate, "evaluate": spent.evaluate}
    accuracy: dict[str, dict[str, Any]] = {}
    for row in sorted(evaluations, key=lambda row: row["version"]):
        split = accuracy.setdefault(row["split"], {"before": row["accuracy"]})
        split |= {"after": row["accuracy"], "num_prompts": row["num_prompts"]}
    return {
        "steps": len(metrics),
        "rollouts": spent.rollouts,
        "responses": {name: part.responses for name, part in purposes.items()},
        "tokens": {name: part.tokens for name, part in purposes.items()},
        "train_s": round(spent.train_s, 1),
        "accuracy": accuracy,
    }
