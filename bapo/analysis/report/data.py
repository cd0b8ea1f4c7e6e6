"""Curves from the records of a run, for pages and figures. Pure: rows in, columns out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bapo.core.statistics import Estimate, estimate, shared_means

Row = Mapping[str, Any]

PHASES = {
    "wait_batch_s": "waiting for the batch",
    "prox_s": "proximal log-probs",
    "update_s": "forward, backward, optimizer",
    "diagnostics_s": "theorem meter",
    "sync_s": "weight update of the workers",
    "checkpoint_s": "checkpoint",
}
"""Parts of a learner step, as metrics.jsonl names them, and in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Values over learner steps, with an interval where there is one."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    num_prompts: int = 0
    """That every point was measured on; 0 where the points have no prompts in common."""


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to window - 1 values before it."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


def held_out_curves(evaluations: Sequence[Row]) -> list[Curve]:
    """Accuracy of each split over steps with its 95 % interval, on the prompts that all its measurements share.

    During a run fewer prompts are measured than before and after it; the points of a curve must be comparable.
    """
    curves = []
    for split in dict.fromkeys(row["split"] for row in evaluations):
        rows = sorted((row for row in evaluations if row["split"] == split), key=lambda row: row["step"])
        means = shared_means([row["rewards"] for row in rows])
        points = [_point(row, of_row) for row, of_row in zip(rows, means, strict=True)]
        curves.append(
            Curve(
                name=split,
                steps=[row["step"] for row in rows],
                values=[point.mean for point in points],
                low=[point.low for point in points],
                high=[point.high for point in points],
                num_prompts=len(means[0]),
            )
        )
    return curves


def _point(row: Row, means: Sequence[float]) -> Estimate:
    return estimate(means) if means else Estimate(row["accuracy"], row["low"], row["high"])
