"""The overview: one row per learner step, as columns; only what the caller has not seen."""

from __future__ import annotations

from typing import Any

from bapo.web.ages import LAST_AGES, table_ages
from bapo.web.held_out import held_out
from bapo.web.steps import StepRows
from bapo.web.view import RunView
from bapo.web.visits import PromptVisits
from bapo.whatif.history import History
from bapo.whatif.reasons import meanings

FOLDS = (StepRows, PromptVisits, History)


def answer(view: RunView, *, since: int = 0, measured: int = 0, generation: int = 0) -> dict[str, Any]:
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
