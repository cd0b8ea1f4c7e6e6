"""What a run cost: rollouts and tokens by purpose, and seconds by phase (the paper's table 2 and figure 9).

A group is counted once, in the step whose assembly first looked at it, whether it trained or not: what was sampled was
paid for. Groups that the buffer never saw (a worker died) are in no record and are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bapo.core.types import Fate, Purpose

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Responses and tokens of one purpose."""

    responses: int = 0
    tokens: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(responses=self.responses + other.responses, tokens=self.tokens + other.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Everything that one run spent."""

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
    groups: Iterable[tuple[int, Sequence[Fate]]], evaluations: Sequence[Row], metrics: Sequence[Row]
) -> Ledger:
    """The ledger of one run.

    Args:
        groups: (step, its fates), in order.
    """
    spent = {Purpose.FRESH: Spent(), Purpose.REEVALUATE: Spent()}
    by_step: dict[int, int] = {}
    total = 0
    for step, fates in first_looks(groups):
        for fate in fates:
            spent[fate.purpose] += Spent(responses=len(fate.rewards), tokens=fate.num_tokens)
            total += len(fate.rewards)
        by_step[step] = total
    return Ledger(
        fresh=spent[Purpose.FRESH],
        reevaluate=spent[Purpose.REEVALUATE],
        evaluate=_measured(evaluations),
        rollouts_by_step=by_step,
        train_s=sum(float(row.get("step_s") or 0.0) + float(row.get("checkpoint_s") or 0.0) for row in metrics),
    )


def first_looks(groups: Iterable[tuple[int, Sequence[Fate]]]) -> Iterator[tuple[int, list[Fate]]]:
    """(step, fates of groups that no earlier step looked at): each sampled group once."""
    seen: set[str] = set()
    for step, fates in groups:
        new = [fate for fate in fates if fate.group_id not in seen]
        seen.update(fate.group_id for fate in new)
        yield step, new


def _measured(evaluations: Sequence[Row]) -> Spent:
    responses = [int(row["num_prompts"]) * int(row["num_samples"]) for row in evaluations]
    tokens = [size * float(row["mean_tokens"]) for size, row in zip(responses, evaluations, strict=True)]
    return Spent(responses=sum(responses), tokens=round(sum(tokens)))
