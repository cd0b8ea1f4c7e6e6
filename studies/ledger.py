"""What a run cost: responses, tokens and seconds, from its records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bapo.core.types import GroupResult, Purpose, num_sampled
from bapo.runtime.run_directory.curves import Row, first_results

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


def write_ledger(path: Path, ledger: Ledger) -> None:
    """What `ledger_of` reads from group records, without them."""
    parts = {name: (part.responses, part.tokens) for name, part in _sampled(ledger).items()}
    path.write_text(json.dumps(parts | {"rollouts": list(ledger.rollouts_by_step.items())}), encoding="utf-8")


def read_ledger(path: Path, evaluations: Sequence[Row], metrics: Sequence[Row]) -> Ledger:
    """The ledger that `write_ledger` wrote."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    fresh, reevaluate = (Spent(responses=fields[name][0], tokens=fields[name][1]) for name in _sampled(Ledger()))
    sampled = Ledger(fresh=fresh, reevaluate=reevaluate, rollouts_by_step=dict(fields["rollouts"]))
    return _with_rows(sampled, evaluations, metrics)


def _sampled(ledger: Ledger) -> dict[str, Spent]:
    return {"fresh": ledger.fresh, "reevaluate": ledger.reevaluate}


def _with_rows(sampled: Ledger, evaluations: Sequence[Row], metrics: Sequence[Row]) -> Ledger:
    train_s = sum(float(row.get("step_s") or 0.0) + float(row.get("checkpoint_s") or 0.0) for row in metrics)
    return replace(sampled, evaluate=_measured(evaluations), train_s=train_s)


def _measured(evaluations: Sequence[Row]) -> Spent:
    responses = [int(row["num_prompts"]) * int(row["num_samples"]) for row in evaluations]
    tokens = [size * float(row["mean_tokens"]) for size, row in zip(responses, evaluations, strict=True)]
    return Spent(responses=sum(responses), tokens=round(sum(tokens)))
