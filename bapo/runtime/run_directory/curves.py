"""What pages and tables read of a run's records: each group once, phases of a step, held-out accuracy and pass@k.

Pure: rows in, numbers out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bapo.core.correctness import pass_at_k
from bapo.core.statistics import estimate, shared_means
from bapo.core.types import GroupResult

Row = Mapping[str, Any]
BASE_VERSION = 1
"""Policy version of the untrained model."""


def first_results(groups: Iterable[tuple[int, Sequence[GroupResult]]]) -> Iterator[tuple[int, list[GroupResult]]]:
    """(step, results of groups that no earlier step saw): each sampled group once."""
    seen: set[str] = set()
    for step, results in groups:
        new = [result for result in results if result.group_id not in seen]
        seen.update(result.group_id for result in new)
        yield step, new


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


def held_out_curves(evaluations: Sequence[Row]) -> list[Curve]:
    """Accuracy of each split over steps with its 95 % interval, as compared with the base model.

    The points are `as_compared`; `num_prompts` are those that each was measured on.
    """
    curves = []
    for split in dict.fromkeys(row["split"] for row in evaluations):
        rows = sorted((row for row in evaluations if row["split"] == split), key=lambda row: row["step"])
        base = rows[0] if rows[0]["version"] == BASE_VERSION else None
        points = [as_compared(row, base) for row in rows]
        curves.append(
            Curve(
                name=split,
                steps=[row["step"] for row in rows],
                values=[point["accuracy"] for point in points],
                low=[point["low"] for point in points],
                high=[point["high"] for point in points],
                num_prompts=[row["num_prompts"] for row in rows],
            )
        )
    return curves


def base_rows(evaluations: Iterable[Row]) -> dict[str, Row]:
    """Split -> the measurement of the base model, for splits that have one."""
    return {row["split"]: row for row in evaluations if row["version"] == BASE_VERSION}


def as_compared(row: Row, base: Row | None) -> Row:
    """A measurement with `accuracy`, `low` and `high` that stand next to the base model's.

    Evaluations during a run have fewer prompts than those before and after it, and the first of a file may be easier
    than the others. Their accuracy is the base model's on all prompts plus the change on the prompts that both have; a
    measurement of the same prompts, or without a base, is as it is.
    """
    rewards, known = row.get("rewards") or {}, (base or {}).get("rewards") or {}
    before, after = shared_means([known, rewards])
    if base is None or not before or known.keys() == rewards.keys():
        return row
    value = base["accuracy"] + sum(after) / len(after) - sum(before) / len(before)
    value = min(1.0, max(0.0, value))  # the other prompts may leave less room for such a change
    moved = value - row["accuracy"]
    ends = {end: min(1.0, max(0.0, row[end] + moved)) for end in ("low", "high") if row.get(end) is not None}
    return {**row, "accuracy": value, **ends}


def passed(row: Row, k: int) -> Row:
    """A measurement with pass@k of each prompt as its reward, so that `accuracy`, `low` and `high` are those of pass@k.

    Prompts with fewer than k responses are left out. Raises: ValueError when none is left.
    """
    rewards = {prompt: [pass_at_k(own, k)] for prompt, own in row["rewards"].items() if len(own) >= k}
    found = estimate([share for [share] in rewards.values()])
    return {**row, "accuracy": found.mean, "low": found.low, "high": found.high, "rewards": rewards}


def migrations(pairs: Iterable[tuple[int, int]], size: int) -> tuple[tuple[int, ...], ...]:
    """[size + 1][size + 1] prompts: row = right responses at first, column = right responses at last."""
    found = Counter(pairs)
    return tuple(tuple(found[first, last] for last in range(size + 1)) for first in range(size + 1))
