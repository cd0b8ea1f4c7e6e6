"""The overview: one row per learner step, as columns; only the steps that the caller has not seen."""

from __future__ import annotations

from typing import Any

from bapo.web.steps import StepRows
from bapo.web.view import RunView

FOLDS = (StepRows,)


def answer(view: RunView, *, since: int = 0, generation: int = 0) -> dict[str, Any]:
    """Steps after the first `since` ones of this generation.

    Answers: `first` (how many steps are left out), `steps` (name of a column -> its values), `run` (what it is).
    """
    first = view.first_new(since, generation)
    return {"first": first, "steps": view.fold(StepRows).columns(first), "run": about(view)}


def about(view: RunView) -> dict[str, Any]:
    """What does not change from step to step, and how the run is."""
    fields, config = view.run.read_run(), view.config
    return {
        "name": config.run.name,
        "status": fields.get("status"),
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
        "slack": config.cadence.slack,
        "max_staleness": config.cadence.max_staleness,
    }
