"""One row per learner step, for the curves of the page. Pure: a fold over recorded steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bapo.config.tree import Config
from bapo.report.data import PHASES
from bapo.types import Origin
from bapo.whatif.recording import RecordedStep

PLAIN = (
    "step", "time", "reward_mean", "c2", "c3", "x1", "x2", "x3", "batch_size", "num_bad", "num_high", "loss",
    "grad_norm", "entropy", "clip_ratio", "kl", "ratio_max", "k1", "k2", "k3", "lr", "num_tokens", "num_active_tokens",
    "num_updates", "step_s", "tokens_per_s", "warning",
)  # fmt: skip
BY_ORIGIN = ("staleness_{}_mean", "staleness_{}_max", "tv_{}", "ess_{}", "delta_{}")
FIELDS = (*PLAIN, *(name.format(origin.value) for origin in Origin for name in BY_ORIGIN), *PHASES)
"""Fields of a row of metrics.jsonl that are sent as they are."""
CELL = ("origin", "age", "num_groups", "tv_tok", "ess", "delta_max")
"""Of each cell of the theorem meter under theta_t that has an age."""
BOUND = ("origin", "num_groups", "gain", "penalty_theta", "penalty_current", "paper", "paper_vacuous", "tight",
         "tight_vacuous")  # fmt: skip
"""Of each estimated bound."""
DIGITS = 6
"""Significant digits that are sent: a curve shows three."""


class StepRows:
    """What the page draws of metrics.jsonl."""

    def __init__(self, config: Config) -> None:
        self._rows: list[list[Any]] = []

    def advance(self, step: RecordedStep) -> None:
        """Take one step."""
        row = step.metrics or {}
        plain = [_second(row.get(name)) if name == "time" else number(row.get(name)) for name in FIELDS]
        self._rows.append([*plain, cells_of(row), bounds_of(row)])

    def columns(self, first: int) -> dict[str, list[Any]]:
        """Name -> values of the steps behind the first ones; `cells` and `bounds` have a list per step."""
        rows = self._rows[first:]
        return {name: [row[index] for row in rows] for index, name in enumerate((*FIELDS, "cells", "bounds"))}


def cells_of(row: Mapping[str, Any]) -> list[list[Any]]:
    """One list of CELL per subset and age."""
    cells = (cell for cell in row.get("divergences", ()) if cell["policy"] == "theta_t" and cell["age"] is not None)
    return [[number(cell.get(name)) for name in CELL] for cell in cells]


def bounds_of(row: Mapping[str, Any]) -> list[list[Any]]:
    """One list of BOUND per subset."""
    return [[number(bound.get(name)) for name in BOUND] for bound in row.get("bounds", ())]


def number(value: Any) -> Any:
    """A number as it is sent: few digits, and null instead of what JSON cannot say."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _second(value: Any) -> Any:
    """Unix time, in which six digits say nothing."""
    return None if value is None else round(value, 2)
