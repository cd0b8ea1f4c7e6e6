"""results.jsonl of a study: one line per run, the newest attempt's, for programs and for estimates of time.

method, seed, run        which
status, exit_code, reason   finished, failed or interrupted; 0, or the launcher's; the last words of a failure
starts, wall_s           how often it was started here, and the seconds of all starts together
steps, rollouts, responses, tokens, train_s    what it did and spent (bapo.analysis.report.ledger); finished runs only
accuracy                 split -> before, after, prompts; finished runs only
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bapo.analysis.report.ledger import ledger_of
from bapo.analysis.study.plan import PlannedRun
from bapo.analysis.study.state import FINISHED
from bapo.runtime.run_directory.files import append_line, keep_lines, read_lines
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.rows import ResultRow


class Results:
    """The file. The study is its only writer."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "results.jsonl"

    def read(self) -> list[dict[str, Any]]:
        """All lines. Raises: RecordError."""
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
            row |= outcome(directory)
        keep_lines(self.path, lambda line: line["run"] != run.name)
        append_line(self.path, row)
        return row


def outcome(run: RunDirectory) -> dict[str, Any]:
    """What a finished run did, spent and reached."""
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
