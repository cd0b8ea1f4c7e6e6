"""Held-out accuracy over the run, and how held-out prompts moved between accuracy bins. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bapo.comparison.gather import BASE_VERSION
from bapo.comparison.migration import matrix_of
from bapo.report.data import held_out_curves
from bapo.web.steps import number

Row = Mapping[str, Any]


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
