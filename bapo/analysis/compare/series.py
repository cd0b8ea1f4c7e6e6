"""Lines over learner steps, one per method: the mean over seeds with the range of the seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from bapo.analysis.compare.accuracy import average_curve, curve
from bapo.analysis.compare.gather import Measured, Method, Row
from bapo.analysis.report.data import smoothed
from bapo.core.types import Origin, Purpose

WINDOW_SHARE = 12
"""A line over steps is the mean of one in so many of them: single steps are noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line."""

    label: str
    steps: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    """The least over seeds; equal to the mean with one seed."""
    high: Sequence[float]

    @property
    def best(self) -> tuple[float, float]:
        """(step, value) of its highest point."""
        place = max(range(len(self.mean)), key=lambda i: self.mean[i])
        return self.steps[place], self.mean[place]


Points = Sequence[tuple[float, float]]
"""(step, value) of one run."""


def over_seeds(label: str, runs: Sequence[Points]) -> Series | None:
    """One line from the points of several runs, at the steps that all of them have; None when there are none."""
    tables = [dict(points) for points in runs if points]
    steps = sorted(set(tables[0]).intersection(*tables[1:])) if tables else []
    if not steps:
        return None
    columns = [[table[step] for table in tables] for step in steps]
    return Series(
        label=label,
        steps=steps,
        mean=[sum(column) / len(column) for column in columns],
        low=[min(column) for column in columns],
        high=[max(column) for column in columns],
    )


def of_metric(method: Method, value: Callable[[Row], float | None]) -> Series | None:
    """A column of metrics.jsonl, smoothed; steps without a value are left out."""
    return over_seeds(method.label, [_smooth([(r["step"], value(r)) for r in run.metrics]) for run in method.runs])


def reward(method: Method) -> Series | None:
    """Mean reward of all fresh responses (figure 4)."""
    return of_metric(method, lambda row: row["reward_mean"])


def response_length(method: Method) -> Series | None:
    """Mean tokens of a fresh response (figure 11)."""
    return over_seeds(method.label, [_smooth(response_lengths(run)) for run in method.runs])


def cumulative_rollouts(method: Method) -> Series | None:
    """Responses for training so far (figure 9)."""
    return over_seeds(method.label, [list(run.ledger.rollouts_by_step.items()) for run in method.runs])


def accuracy(method: Method, split: str) -> Series | None:
    """Held-out accuracy of a split (figure 12)."""
    return over_seeds(method.label, [curve(run, split) for run in method.runs])


def average_accuracy(method: Method, splits: Sequence[str]) -> Series | None:
    """Mean of the splits (figures 5, 6, 10)."""
    return over_seeds(method.label, [average_curve(run, splits) for run in method.runs]) if splits else None


def parts(method: Method) -> dict[Origin, Series]:
    """X1, X2 and X3 of each step, smoothed (figures 8 and 14)."""
    found = {origin: of_metric(method, partial(_size, origin.value)) for origin in Origin}
    return {origin: series for origin, series in found.items() if series is not None}


def response_lengths(run: Measured) -> list[tuple[float, float | None]]:
    """(step, mean tokens of its fresh responses); None for a step that has none."""
    points: list[tuple[float, float | None]] = []
    for step, fates in run.sampled:
        fresh = [fate for fate in fates if fate.purpose is Purpose.FRESH]
        responses = sum(len(fate.rewards) for fate in fresh)
        points.append((step, sum(fate.num_tokens for fate in fresh) / responses if responses else None))
    return points


def _size(key: str, row: Row) -> float:
    return float(row[key])


def _smooth(points: Sequence[tuple[float, float | None]]) -> Points:
    known = [(step, value) for step, value in points if value is not None]
    window = max(1, len(known) // WINDOW_SHARE)
    means = smoothed([value for _, value in known], window)
    return [(step, mean) for (step, _), mean in zip(known, means, strict=True)]
