"""From the records of a run to the numbers of its report. Pure: rows in, columns out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bapo.algorithms.composer import Reason
from bapo.statistics import Estimate, estimate, shared_means
from bapo.types import Fate, Purpose

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """What each batch was made of (Fig. 8)."""

    steps: Sequence[int]
    x1: Sequence[int]
    x2: Sequence[int]
    x3: Sequence[int]
    batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """Share of fresh groups by how many of their G responses are right (Fig. 7), early and late in the run."""

    first: Sequence[float]
    """[G + 1] shares over the first quarter of the steps; element k: k of G right."""
    last: Sequence[float]
    """The same over the last quarter."""


def composition(metrics: Sequence[Row]) -> Composition:
    """X1, X2, X3 and B of every step."""
    return Composition(
        steps=[row["step"] for row in metrics],
        x1=[row["x1"] for row in metrics],
        x2=[row["x2"] for row in metrics],
        x3=[row["x3"] for row in metrics],
        batch_size=int(metrics[-1]["batch_size"]),
    )


def reward_curve(metrics: Sequence[Row]) -> Curve:
    """r_tot of every step (Fig. 4)."""
    return Curve(name="reward", steps=[row["step"] for row in metrics], values=[row["reward_mean"] for row in metrics])


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


def quarters(steps: Sequence[int]) -> tuple[list[int], list[int]]:
    """The first and the last quarter of the steps, at least one step each."""
    size = max(1, len(steps) // 4)
    return list(steps[:size]), list(steps[-size:])


def accuracy_bins(first: Iterable[Sequence[Fate]], last: Iterable[Sequence[Fate]], group_size: int) -> Bins:
    """Bins of the fresh groups of the given steps."""
    return Bins(first=_shares(first, group_size), last=_shares(last, group_size))


def phase_seconds(metrics: Sequence[Row]) -> list[tuple[str, float, float]]:
    """(phase, mean seconds per step, share of the step) for every phase, and for what is left."""
    total = sum(row["step_s"] for row in metrics)
    sums = {words: sum(row.get(key) or 0.0 for row in metrics) for key, words in PHASES.items()}
    sums["everything else"] = max(0.0, total - sum(sums.values()))
    return [(words, seconds / len(metrics), seconds / total if total else 0.0) for words, seconds in sums.items()]


def _shares(steps: Iterable[Sequence[Fate]], group_size: int) -> list[float]:
    new = (fate for fates in steps for fate in fates if _is_new(fate) and len(fate.rewards) == group_size)
    right = Counter(round(sum(fate.rewards)) for fate in new)
    total = sum(right.values())
    return [right[k] / total if total else 0.0 for k in range(group_size + 1)]


def _is_new(fate: Fate) -> bool:
    """Sampled for this step from the data order: neither asked again nor used again."""
    return fate.purpose is Purpose.FRESH and fate.reason not in (Reason.REUSED, Reason.YOUNGEST)
