"""What a run cost: responses, tokens and seconds, from its records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from bapo.core.types import Count, GroupResult, Purpose, num_sampled
from bapo.runtime.run_directory.curves import Row, first_results
from bapo.runtime.run_directory.files import read_content
from bapo.runtime.run_directory.rows import Step, object_of

LEDGER_FILE = "ledger.json"
"""In the directory of a run whose group records were left out of an archive (`benchmarks.archive`)."""


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
    sampled = Ledger(fresh=spent[Purpose.FRESH], reevaluate=spent[Purpose.REEVALUATE], rollouts_by_step=by_step)
    return _with_rows(sampled, evaluations, metrics)


class LedgerRow(msgspec.Struct):
    """`LEDGER_FILE`."""

    fresh: tuple[Count, Count]
    """Responses and tokens."""
    reevaluate: tuple[Count, Count]
    rollouts: list[tuple[Step, Count]]
    """Step, responses for training up to it."""


def write_ledger(path: Path, ledger: Ledger) -> None:
    """What `ledger_of` reads from group records, without them."""
    row = LedgerRow(
        fresh=(ledger.fresh.responses, ledger.fresh.tokens),
        reevaluate=(ledger.reevaluate.responses, ledger.reevaluate.tokens),
        rollouts=list(ledger.rollouts_by_step.items()),
    )
    path.write_bytes(msgspec.json.encode(row))


def read_ledger(path: Path, evaluations: Sequence[Row], metrics: Sequence[Row]) -> Ledger:
    """The ledger that `write_ledger` wrote. Raises: RecordError for a damaged file; StorageError."""
    fields = object_of(read_content(path), str(path), LedgerRow)
    fresh, reevaluate = (
        Spent(responses=responses, tokens=tokens) for responses, tokens in (fields["fresh"], fields["reevaluate"])
    )
    sampled = Ledger(fresh=fresh, reevaluate=reevaluate, rollouts_by_step=dict(fields["rollouts"]))
    return _with_rows(sampled, evaluations, metrics)


def _with_rows(sampled: Ledger, evaluations: Sequence[Row], metrics: Sequence[Row]) -> Ledger:
    train_s = sum(float(row.get("step_s") or 0.0) + float(row.get("checkpoint_s") or 0.0) for row in metrics)
    return replace(sampled, evaluate=_measured(evaluations), train_s=train_s)


def _measured(evaluations: Sequence[Row]) -> Spent:
    responses = [int(row["num_prompts"]) * int(row["num_samples"]) for row in evaluations]
    tokens = [size * float(row["mean_tokens"]) for size, row in zip(responses, evaluations, strict=True)]
    return Spent(responses=sum(responses), tokens=round(sum(tokens)))
