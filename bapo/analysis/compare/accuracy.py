"""Accuracies of methods, over seeds and prompts, at equal steps; paired tests between methods.

A measurement during a run is made on fewer prompts than those at its ends, so a curve has it as the base's accuracy on
all prompts plus the change on the prompts that both have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bapo.analysis.compare.gather import BASE_VERSION, Measured, Method
from bapo.analysis.significance import PairTest, crossed, mcnemar, stratified
from bapo.core.statistics import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedTest:
    """Two methods at one seed, on the same prompts."""

    seed: int
    test: PairTest


@dataclass(frozen=True, slots=True, kw_only=True)
class Versus:
    """A method against the reference."""

    split: str
    difference: Estimate | None
    """Mean over shared seeds and prompts, with its interval over both; None without a shared seed."""
    by_seed: tuple[SeedTest, ...]
    all_seeds: PairTest


def final_accuracy(method: Method, split: str) -> Estimate | None:
    """Accuracy after training, with its interval over seeds and prompts; None when it was not measured."""
    return _over(_tables(method.runs, split, last=True))


def base_accuracy(runs: Iterable[Measured], split: str) -> Estimate | None:
    """Accuracy of the base model, over all its measurements."""
    return _over(_tables(runs, split, last=False))


def versus(reference: Method, method: Method, split: str) -> Versus:
    """Their difference after training, paired by seed and prompt."""
    ours = {run.seed: run.means(split, last=True) for run in method.runs}
    theirs = {run.seed: run.means(split, last=True) for run in reference.runs}
    seeds = [seed for seed in theirs if ours.get(seed) and theirs[seed]]
    pairs = []
    for seed in seeds:
        prompts = sorted(set(ours[seed]) & set(theirs[seed]))
        pairs.append(([theirs[seed][p] for p in prompts], [ours[seed][p] for p in prompts]))
    table = [[b - a for a, b in zip(first, second, strict=True)] for first, second in pairs]
    return Versus(
        split=split,
        difference=crossed(table) if table and len(table[0]) > 1 else None,
        by_seed=tuple(
            SeedTest(seed=seed, test=mcnemar(first, second)) for seed, (first, second) in zip(seeds, pairs, strict=True)
        ),
        all_seeds=stratified(pairs),
    )


def curve(run: Measured, split: str) -> list[tuple[int, float]]:
    """(step, accuracy) of every measurement, each as the base's accuracy plus the change on shared prompts."""
    rows = run.rows(split)
    base = next((row for row in rows if row["version"] == BASE_VERSION), None)
    if base is None:
        return [(int(row["step"]), float(row["accuracy"])) for row in rows]
    points = []
    for row in rows:
        shared = [prompt for prompt in base["rewards"] if prompt in row["rewards"]]
        if not shared:
            points.append((int(row["step"]), float(row["accuracy"])))
            continue
        change = _mean(row["rewards"], shared) - _mean(base["rewards"], shared)
        points.append((int(row["step"]), _mean(base["rewards"], list(base["rewards"])) + change))
    return points


def average_curve(run: Measured, splits: Sequence[str]) -> list[tuple[int, float]]:
    """The mean of the splits' curves at the steps that all of them have."""
    curves = [dict(curve(run, split)) for split in splits]
    steps = sorted(set(curves[0]).intersection(*curves[1:])) if curves else []
    return [(step, sum(values[step] for values in curves) / len(curves)) for step in steps]


def rollouts_at(run: Measured, step: int) -> int:
    """Responses for training up to and with a step; 0 before the first."""
    spent = run.ledger.rollouts_by_step
    known = [done for done in spent if done <= step]
    return spent[max(known)] if known else 0


def mean_and_range(values: Sequence[float]) -> tuple[float, float, float] | None:
    """(mean, least, most); None without values."""
    return (sum(values) / len(values), min(values), max(values)) if values else None


def _tables(runs: Iterable[Measured], split: str, *, last: bool) -> list[dict[str, float]]:
    return [means for run in runs if (means := run.means(split, last=last))]


def _over(tables: Sequence[Mapping[str, float]]) -> Estimate | None:
    if not tables:
        return None
    prompts = [prompt for prompt in tables[0] if all(prompt in other for other in tables[1:])]
    if len(prompts) < 2:
        return None
    return crossed([[means[prompt] for prompt in prompts] for means in tables])


def _mean(rewards: Mapping[str, Sequence[float]], prompts: Sequence[str]) -> float:
    return sum(sum(rewards[p]) / len(rewards[p]) for p in prompts) / len(prompts)
