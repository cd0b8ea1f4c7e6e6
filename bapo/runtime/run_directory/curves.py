"""What pages and tables read of a run's records: each group once, phases of a step, held-out accuracy over steps.

Pure: rows in, numbers out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bapo.core.statistics import Estimate, shared_means
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


def migrations(pairs: Iterable[tuple[int, int]], size: int) -> tuple[tuple[int, ...], ...]:
    """[size + 1][size + 1] prompts: row = right responses at first, column = right responses at last."""
    found = Counter(pairs)
    return tuple(tuple(found[first, last] for last in range(size + 1)) for first in range(size + 1))
