"""One row per learner step, for the curves of the page. Pure: a fold over recorded steps."""

from __future__ import annotations

import math
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
COLUMNS = (*PLAIN, *(name.format(origin.value) for origin in Origin for name in BY_ORIGIN), *PHASES)
"""Fields of a row of metrics.jsonl."""
DIGITS = 6
"""Significant digits that are sent: a curve shows three."""


class StepRows:
    """Columns of metrics.jsonl that the page draws."""

    def __init__(self, config: Config) -> None:
        self._rows: list[list[Any]] = []

    def advance(self, step: RecordedStep) -> None:
        """Take one step."""
        row = step.metrics or {}
        self._rows.append([_second(row.get(name)) if name == "time" else number(row.get(name)) for name in COLUMNS])

    def columns(self, first: int) -> dict[str, list[Any]]:
        """Name -> values of the steps behind the first ones."""
        rows = self._rows[first:]
        return {name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)}


def number(value: Any) -> Any:
    """A number as it is sent: few digits, and null instead of what JSON cannot say."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _second(value: Any) -> Any:
    """Unix time, in which six digits say nothing."""
    return None if value is None else round(value, 2)
