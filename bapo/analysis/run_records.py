"""What a run cost and its curves over steps, from its records. Pure: rows in, numbers out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bapo.core.statistics import Estimate, shared_means
from bapo.core.types import GroupResult, Purpose, num_sampled

Row = Mapping[str, Any]
BASE_VERSION = 1
"""Policy version of the untrained model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    responses: int = 0
    tokens: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(responses=self.responses + other.responses, tokens=self.tokens + other.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    fresh: Spent = Spent()
    reevaluate: Spent = Spent()
    evaluate: Spent = Spent()
    rollouts_by_step: Mapping[int, int] = field(default_factory=dict)
    """Step -> responses for training up to it, fresh and re-evaluated."""
    train_s: float = 0.0
    """Seconds of all learner steps, checkpoints included: neither start-up nor the measurements before and after."""

    @property
    def rollouts(self) -> int:
        """Responses for training: what the paper's table 1 counts."""
        return self.fresh.responses + self.reevaluate.responses


def ledger_of(
    groups: Iterable[tuple[int, Sequence[GroupResult]]], evaluations: Sequence[Row], metrics: Sequence[Row]
) -> Ledger:
    """The ledger of one run.

    Args:
        groups: (step, its results), in order.
    """
    spent = {Purpose.FRESH: Spent(), Purpose.REEVALUATE: Spent()}
    by_step: dict[int, int] = {}
    total = 0
    for step, results in first_results(groups):
        for result in results:
            spent[result.purpose] += Spent(responses=num_sampled(result), tokens=result.num_tokens)
            total += num_sampled(result)
        by_step[step] = total
    return Ledger(
        fresh=spent[Purpose.FRESH],
        reevaluate=spent[Purpose.REEVALUATE],
        evaluate=_measured(evaluations),
        rollouts_by_step=by_step,
        train_s=sum(float(row.get("step_s") or 0.0) + float(row.get("checkpoint_s") or 0.0) for row in metrics),
    )


def first_results(groups: Iterable[tuple[int, Sequence[GroupResult]]]) -> Iterator[tuple[int, list[GroupResult]]]:
    """(step, results of groups that no earlier step saw): each sampled group once."""
    seen: set[str] = set()
    for step, results in groups:
        new = [result for result in results if result.group_id not in seen]
        seen.update(result.group_id for result in new)
        yield step, new


def _measured(evaluations: Sequence[Row]) -> Spent:
    responses = [int(row["num_prompts"]) * int(row["num_samples"]) for row in evaluations]
    tokens = [size * float(row["mean_tokens"]) for size, row in zip(responses, evaluations, strict=True)]
    return Spent(responses=sum(responses), tokens=round(sum(tokens)))


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
    name: str
    steps: Sequence[int]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    num_prompts: Sequence[int] = ()
    """Prompts of each point."""


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to window - 1 values before it."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


def held_out_curves(evaluations: Sequence[Row]) -> list[Curve]:
    """Accuracy of each split over steps with its 95 % interval, as compared with the base model.

    Evaluations during a run have fewer prompts than those before and after it. Their points are the base model's
    accuracy on all prompts plus the change on the prompts that both have; a point with all prompts is its own accuracy.
    """
    curves = []
    for split in dict.fromkeys(row["split"] for row in evaluations):
        rows = sorted((row for row in evaluations if row["split"] == split), key=lambda row: row["step"])
        base = rows[0] if rows[0]["version"] == BASE_VERSION else None
        points = [_point(row, base) for row in rows]
        curves.append(
            Curve(
                name=split,
                steps=[row["step"] for row in rows],
                values=[point.mean for point in points],
                low=[point.low for point in points],
                high=[point.high for point in points],
                num_prompts=[row["num_prompts"] for row in rows],
            )
        )
    return curves


def _point(row: Row, base: Row | None) -> Estimate:
    accuracy, low, high = row["accuracy"], row["low"], row["high"]
    before, after = shared_means([base["rewards"], row["rewards"]]) if base is not None else ([], [])
    if base is None or not before:
        return Estimate(accuracy, low, high)
    value = base["accuracy"] + sum(after) / len(after) - sum(before) / len(before)
    return Estimate(value, max(0.0, value - (accuracy - low)), min(1.0, value + (high - accuracy)))
