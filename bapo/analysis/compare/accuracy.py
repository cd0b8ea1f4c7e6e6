"""Accuracies of methods over seeds and prompts: after training, at equal responses, and responses for equal accuracy.

A measurement during a run has fewer prompts than those at its ends, so a curve has it as the base's accuracy on all
prompts plus the change on the shared ones. Cost is the responses sampled for training, fresh and re-evaluated. Between
two measurements an accuracy is interpolated linearly; the base measurement is the point at 0 responses; beyond the last
measurement there is no answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bapo.analysis.compare.gather import BASE_VERSION, Measured, Method
from bapo.analysis.significance import PairTest, crossed, geometric, mcnemar, stratified
from bapo.core.statistics import Estimate
from bapo.core.text import count


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


Means = Mapping[str, float]
"""Prompt id -> share of right responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtEqualResponses:
    """A method and a reference after as many training responses, paired by seed and prompt."""

    budget: int
    """Training responses: what the cheapest of their runs spent in all."""
    seeds: tuple[int, ...]
    num_prompts: int
    """That every measurement used has."""
    method: float
    reference: float
    """Mean accuracies on these prompts."""
    difference: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedNeed:
    """Responses that two runs of one seed needed for the accuracy that the second ended with."""

    seed: int
    needed: float | None
    """By the method; None: it was never that accurate."""
    spent: int
    """By the method in all."""
    own: float
    """By the run whose accuracy it is; 0: it ended no better than it began."""

    @property
    def ratio(self) -> float | None:
        """needed / own; None where either has no answer."""
        return self.needed / self.own if self.needed is not None and self.own else None

    @property
    def least(self) -> float | None:
        """What the ratio is at least: itself, or spent / own where the accuracy was not reached."""
        return (self.spent if self.needed is None else self.needed) / self.own if self.own else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Responses that a method needs for another one's accuracy, relative to what that one needed itself."""

    by_seed: tuple[SeedNeed, ...]
    ratio: Estimate | None
    """Geometric mean over seeds with its interval; None unless every one of two or more seeds has a ratio above 0."""

    @property
    def reached(self) -> int:
        """Seeds in which the method was as accurate at some point."""
        return sum(one.needed is not None for one in self.by_seed)

    @property
    def bounds(self) -> tuple[float, float | None] | None:
        """The least and the most over seeds; most is None when a seed did not reach it, all None without a gain."""
        least = [one.least for one in self.by_seed if one.least is not None]
        most = [one.ratio for one in self.by_seed if one.least is not None]
        known = [ratio for ratio in most if ratio is not None]
        return (min(least), max(known) if len(known) == len(most) else None) if least else None


def at_equal_responses(method: Method, reference: Method, split: str) -> AtEqualResponses | str:
    """Their paired difference after as many responses as the cheapest of their runs spent, or why there is none."""
    runs = list(shared_seeds(method, reference))
    if not runs:
        return "no seed in common"
    budget = min(run.ledger.rollouts for pair in runs for run in pair)
    tables: list[tuple[Means, Means]] = []
    for ours, theirs in runs:
        a, b = means_at(ours, split, budget), means_at(theirs, split, budget)
        if isinstance(a, str):
            return a
        if isinstance(b, str):
            return b
        tables.append((a, b))
    prompts = [p for p in tables[0][0] if all(p in means for pair in tables for means in pair)]
    if len(prompts) < 2:
        return f"{len(prompts)} prompts are in all measurements around {count(budget)} responses"
    return AtEqualResponses(
        budget=budget,
        seeds=tuple(ours.seed for ours, _ in runs),
        num_prompts=len(prompts),
        method=sum(_mean_on(a, prompts) for a, _ in tables) / len(tables),
        reference=sum(_mean_on(b, prompts) for _, b in tables) / len(tables),
        difference=crossed([[a[p] - b[p] for p in prompts] for a, b in tables]),
    )


def means_at(run: Measured, split: str, budget: int) -> Means | str:
    """Each prompt's accuracy after this many training responses, on the prompts of both measurements around it.

    A measurement less than one step's responses away is taken as it is: there are no weights in between. Otherwise
    returns the reason why there is no answer.
    """
    points = _measurements(run, split)
    if not points:
        return f"{run.name} has no measurement of {split}"
    step = run.ledger.rollouts / run.num_steps
    distance, nearest = min((abs(spent - budget), spent) for spent in points)
    if distance < max(step, 1):
        return points[nearest]
    if budget > max(points):
        return f"{run.name} was last measured after {count(max(points))} responses, before {count(budget)}"
    if budget < min(points):
        return f"{run.name} was first measured after {count(min(points))} responses, behind {count(budget)}"
    low, high = next(pair for pair in pairwise(sorted(points)) if pair[0] <= budget <= pair[1])
    along = (budget - low) / (high - low)
    before, after = points[low], points[high]
    return {p: before[p] + along * (after[p] - before[p]) for p in before if p in after}


def responses_for(method: Method, other: Method, split: str) -> Need | str:
    """How many responses a method needs for the accuracy that another one has at its end, or why that has no answer.

    Both are read off their curves by the same rule, the first crossing of that accuracy, seed by seed.
    """
    seeds = []
    for ours, theirs in shared_seeds(method, other):
        curves = [accuracy_by_responses(run, split) for run in (ours, theirs)]
        for run, points in zip((ours, theirs), curves, strict=True):
            if len(points) < 2 or points[0][0] > 0:
                return f"{run.name} was not measured before and during or after training"
        target = curves[1][-1][1]
        own = first_crossing(curves[1], target)
        assert own is not None  # its last point is the target
        needed = first_crossing(curves[0], target)
        seeds.append(SeedNeed(seed=ours.seed, needed=needed, spent=curves[0][-1][0], own=own))
    if not seeds:
        return "no seed in common"
    ratios = [one.ratio for one in seeds if one.ratio]
    whole = len(ratios) == len(seeds) > 1
    return Need(by_seed=tuple(seeds), ratio=geometric(ratios) if whole else None)


def accuracy_by_responses(run: Measured, split: str) -> list[tuple[int, float]]:
    """(training responses so far, accuracy) of every measurement, in order."""
    return sorted({rollouts_at(run, step): value for step, value in curve(run, split)}.items())


def first_crossing(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """Where the polygon through the points is first at the target or above; None if it never is."""
    if points[0][1] >= target:
        return points[0][0]
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 >= target:
            return x0 + (x1 - x0) * (target - y0) / (y1 - y0)
    return None


def shared_seeds(method: Method, other: Method) -> Iterator[tuple[Measured, Measured]]:
    """Their runs with the same seed, in the order of seeds."""
    theirs = {run.seed: run for run in other.runs}
    yield from ((run, theirs[run.seed]) for run in method.runs if run.seed in theirs)


def _measurements(run: Measured, split: str) -> dict[int, Means]:
    """Training responses so far -> what was measured there."""
    return {
        0 if row["version"] == BASE_VERSION else rollouts_at(run, int(row["step"])): {
            prompt: sum(rewards) / len(rewards) for prompt, rewards in row["rewards"].items()
        }
        for row in run.rows(split)
    }


def _mean_on(means: Means, prompts: Sequence[str]) -> float:
    return sum(means[prompt] for prompt in prompts) / len(prompts)
