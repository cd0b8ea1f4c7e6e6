"""Which weights of a run measured best: for the checkpoints to keep, early stopping, tables and `bapo export --best`.

Measurements are compared over the prompts that all of them have: those before and after training have more prompts. One
in which most prompts were dropped is left out: it would reduce all others to the rest. While a run trains, held-out
responses are sampled by weights some steps newer than the checkpoint of the row's step; `scope_of` says so.
The best of many measurements is optimistic: its own mean is partly luck. Does not cover: correcting for that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bapo.core.statistics import shared_means
from bapo.core.text import percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Some weights, measured."""

    split: str
    step: int
    """Number of learner steps of these weights; 0: the base model."""
    mean: float
    """Mean reward over the prompts that all measurements of the split have."""
    sampled_after: tuple[int, int] | None = None
    """Steps of the oldest and newest weights that sampled a token of it, where these are not the weights of `step`."""

    @property
    def version(self) -> int:
        return self.step + 1


def measured(evaluations: Iterable[Mapping[str, Any]], name: str | None) -> list[Measured]:
    """The measurements that weights are chosen by, in step order.

    Args:
        evaluations: rows of evaluations.jsonl.
        name: `evaluation.best_measure`; None: the split of the first row, which is the first split of the task.
    """
    found: dict[int, Mapping[str, Any]] = {}
    for row in evaluations:
        if row.get("split") is None or row.get("accuracy") is None:  # rows of other programs may miss anything
            continue
        name = row["split"] if name is None else name
        if row["split"] == name and (row.get("num_dropped") or 0) <= (row.get("num_prompts") or 1):
            found[int(row["version"])] = row
    rows = [found[version] for version in sorted(found)]
    means = shared_means([row.get("rewards") or {} for row in rows]) if rows else []
    return [
        Measured(
            split=row["split"],
            step=int(row["version"]) - 1,
            mean=sum(own) / len(own) if own else float(row["accuracy"]),  # no prompt in common
            sampled_after=sampled_after(row),
        )
        for row, own in zip(rows, means, strict=True)
    ]


def sampled_after(row: Mapping[str, Any]) -> tuple[int, int] | None:
    """Steps of the oldest and newest weights that sampled a token of a measurement; None: the weights of its step."""
    versions = row.get("versions")
    if not versions or set(versions) == {row["version"]}:
        return None
    return int(versions[0]) - 1, int(versions[1]) - 1


def best_first(found: Iterable[Measured]) -> list[Measured]:
    """The highest mean first; of equal ones the earlier."""
    return sorted(found, key=lambda one: (-one.mean, one.step))


def best_steps(found: Iterable[Measured], steps: Collection[int], number: int) -> set[int]:
    """Of the checkpoints after these steps, the `number` that measured best: those of `checkpoint.keep_best`."""
    return {one.step for one in best_first(one for one in found if one.step in steps)[:number]}


def best_of(evaluations: Iterable[Mapping[str, Any]], name: str | None) -> Measured | None:
    """The best of several measurements; None if there are fewer than two. Arguments: as `measured`."""
    found = measured(evaluations, name)
    return best_first(found)[0] if len(found) > 1 else None


def scope_of(best: Measured, evaluations: Iterable[Mapping[str, Any]]) -> str:
    """What the mean is over: `over the prompts that all have`, where the evaluation of these weights alone says another
    mean; of which weights, where they are newer. Begins with a blank; may be empty."""
    rows = [row for row in evaluations if row.get("split") == best.split and row.get("version") == best.version]
    differs = rows and percent(rows[-1]["accuracy"]) != percent(best.mean)
    return (" over the prompts that all have" if differs else "") + newer_weights(best)


def newer_weights(one: Measured) -> str:
    """` (sampled by the weights after steps 31 to 32)`, where a measurement is not by the weights of its own step."""
    return named_weights(one.sampled_after)


def named_weights(steps: tuple[int, int] | None) -> str:
    """The words of `newer_weights` for a result of `sampled_after`."""
    if steps is None:
        return ""
    first, last = steps
    return f" (sampled by the weights after {f'step {last}' if first == last else f'steps {first} to {last}'})"


def last_improvement(found: Sequence[Measured], min_improvement: float) -> int:
    """Index of the last measurement that exceeded the one that did so before it by more than `min_improvement`.

    Example: 0.20, 0.30, 0.305, 0.31, 0.32 with 0.01 -> 4, because 0.32 > 0.30 + 0.01, and 0.31 is not.
    """
    last = 0
    for index, one in enumerate(found):
        if one.mean > found[last].mean + min_improvement:
            last = index
    return last
