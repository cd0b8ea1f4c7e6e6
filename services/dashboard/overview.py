"""The overview: one row per learner step, as columns; only what the caller has not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bapo.analysis.compare.gather import BASE_VERSION
from bapo.analysis.compare.migration import matrix_of
from bapo.analysis.report.data import held_out_curves
from bapo.analysis.whatif.history import History
from bapo.analysis.whatif.reasons import meanings
from services.dashboard.run_view import RunView, number
from services.dashboard.step_columns import LAST_AGES, PromptVisits, StepRows, table_ages

Row = Mapping[str, Any]


def overview(view: RunView, *, since: int = 0, measured: int = 0, generation: int = 0) -> dict[str, Any]:
    """What came after the first `since` steps and the first `measured` evaluations of this generation.

    Answers: `first` (how many steps are left out), `steps` (name of a column -> its values), `held_out` (all of it, or
    null when there is no new evaluation), `measured`, `run` (what it is and how it goes), `meanings` (reason -> what
    the word means; in the first answer).
    """
    first, known = view.first_new(since, generation), view.first_new(measured, generation)
    steps = view.fold(StepRows).columns(first) | view.fold(PromptVisits).columns(first)
    steps |= table_ages(view.fold(History), first)
    rows = view.evaluations
    return {
        "first": first,
        "steps": steps,
        "measured": len(rows),
        "held_out": held_out(rows) if len(rows) != known else None,
        "run": about(view),
        "meanings": meanings(view.config.algorithm.name) if first == 0 else None,
    }


def about(view: RunView) -> dict[str, Any]:
    """What does not change from step to step, and how the run is."""
    fields, config = view.run.read_run(), view.config
    return {
        "name": config.run.name,
        "status": fields.get("status"),
        "message": fields.get("message"),
        "started_at": fields.get("started_at"),
        "ended_at": fields.get("ended_at"),
        "num_steps": config.run.num_steps,
        "algorithm": config.algorithm.name,
        "model": config.model.path,
        "task": config.task.name,
        "batch_size": config.algorithm.batch_size,
        "group_size": config.algorithm.group_size,
        "c1": config.algorithm.c1,
        "v": config.cadence.v,
        "m": config.cadence.m,
        "max_staleness": config.cadence.max_staleness,
        "tv_warn": config.diagnostics.tv_warn,
        "ess_warn": config.diagnostics.ess_warn,
        "age_ends": LAST_AGES,
    }


def held_out(evaluations: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry per split, points in the order of steps.

    `accuracy`, `low` and `high` are on the prompts that all measurements of the split share (`num_prompts`).
    `matrices`: per measurement [n + 1][n + 1] prompts by right responses before training (row) and now; null where the
    base model was not measured. `num_samples`: n.
    """
    found = []
    for curve in held_out_curves(evaluations):
        rows = sorted((row for row in evaluations if row["split"] == curve.name), key=lambda row: row["step"])
        base = next((row for row in rows if row["version"] == BASE_VERSION), None)
        found.append({
            "split": curve.name,
            "num_prompts": curve.num_prompts,
            "num_samples": rows[0]["num_samples"],
            "interval": rows[0]["interval"],
            "step": list(curve.steps),
            "accuracy": [number(value) for value in curve.values],
            "low": [number(value) for value in curve.low],
            "high": [number(value) for value in curve.high],
            "matrices": [_moved(base, row) for row in rows],
        })  # fmt: skip
    return found


def _moved(base: Row | None, row: Row) -> list[list[int]] | None:
    """Prompts that both measurements have; None when there is nothing to compare with."""
    if base is None or base["num_samples"] != row["num_samples"]:
        return None
    before, after = base["rewards"], row["rewards"]
    pairs = [(round(sum(before[name])), round(sum(after[name]))) for name in before if name in after]
    return [list(line) for line in matrix_of(pairs, int(row["num_samples"])).counts]
