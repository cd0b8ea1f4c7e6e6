"""Held-out prompts without a right response, and which of them have one after training: one population for all methods.

Many prompts that are at 0/n in one sample are not in a second one of the same weights. A method that is looked at
through its own base measurement is therefore looked at on prompts of its own, which chance has chosen. Here every
prompt counts with the share of all base measurements in which it had no right response. The question stays (of what a
base measurement leaves unsolved, what share has a right response after training?), the population is one for all
methods and does not shrink with more runs, and the floor is that of this very population: the share that a base
measurement of another seed solves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from bapo.analysis.compare.gather import Measured, Method
from bapo.analysis.compare.responses import shared_seeds
from bapo.analysis.significance import weighted
from bapo.core.statistics import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsolved:
    """How often the base model leaves each prompt of a split without a right response."""

    weights: Mapping[str, float]
    """Prompt id -> share of base measurements at 0/n: mean over seeds of the share of the seed's measurements."""
    twice: Mapping[str, float]
    """Prompt id -> chance that two measurements of different seeds are both at 0/n; empty with one seed."""

    @property
    def size(self) -> float:
        """Prompts that a base measurement leaves unsolved, on average."""
        return sum(self.weights.values())


def unsolved(runs: Iterable[Measured], split: str) -> Unsolved | None:
    """The population of runs with one base model; None where it solved everything or was not measured.

    Measurements of runs with the same seed are no independent samples of each other: their engines start alike.
    """
    by_seed: dict[int, list[Mapping[str, float]]] = {}
    measured = []
    for run in runs:
        base, final = run.means(split, last=False), run.means(split, last=True)
        if base:
            by_seed.setdefault(run.seed, []).append(base)
        measured += [means for means in (base, final) if means]
    prompts = [prompt for prompt in measured[0] if all(prompt in means for means in measured)] if by_seed else []
    failed = {p: [sum(means[p] == 0 for means in own) / len(own) for own in by_seed.values()] for p in prompts}
    found = Unsolved(
        weights={prompt: sum(shares) / len(shares) for prompt, shares in failed.items()},
        twice={prompt: _both(shares) for prompt, shares in failed.items()} if len(by_seed) > 1 else {},
    )
    return found if found.size > 0 else None


def floor(population: Unsolved) -> Estimate | None:
    """The share that the base model itself solves when it is measured again; None with one seed."""
    weights, again = list(population.weights.values()), _solved_again(population)
    return weighted([again], weights) if again and len(again) > 1 else None


def rescued(method: Method, split: str, population: Unsolved) -> Estimate | None:
    """The share that has a right response after training, over seeds and prompts; None if it was not measured."""
    tables = [table for run in method.runs if (table := _solved(run, split, population))]
    return _over(tables, population) if tables else None


def above_floor(method: Method, split: str, population: Unsolved) -> Estimate | None:
    """`rescued` less `floor`, on the same prompts; None without either."""
    again = _solved_again(population)
    tables = [table for run in method.runs if (table := _solved(run, split, population))]
    if not again or not tables:
        return None
    return _over([[x - y for x, y in zip(table, again, strict=True)] for table in tables], population)


def rescued_more(method: Method, reference: Method, split: str, population: Unsolved) -> Estimate | None:
    """`rescued` of a method less that of a reference, paired by seed and prompt; None without a shared seed."""
    pairs = ((_solved(a, split, population), _solved(b, split, population)) for a, b in shared_seeds(method, reference))
    tables = [[x - y for x, y in zip(ours, theirs, strict=True)] for ours, theirs in pairs if ours and theirs]
    return _over(tables, population) if tables else None


def base_of(run: Measured) -> str:
    """What two runs must share to have the same base model."""
    return run.config.model.model_dump_json()


def _solved(run: Measured, split: str, population: Unsolved) -> list[float]:
    """[P] weight of each prompt with a right response after training, else 0; empty if it was not measured."""
    means = run.means(split, last=True)
    return [weight * (means[prompt] > 0) for prompt, weight in population.weights.items()] if means else []


def _solved_again(population: Unsolved) -> list[float]:
    """[P] chance of a prompt to be at 0/n first and not a second time; empty with one seed."""
    return [weight - population.twice[p] for p, weight in population.weights.items()] if population.twice else []


def _over(tables: Sequence[Sequence[float]], population: Unsolved) -> Estimate | None:
    weights = list(population.weights.values())
    return weighted(tables, weights) if len(weights) > 1 else None


def _both(shares: Sequence[float]) -> float:
    """Mean product over ordered pairs of different seeds."""
    pairs = list(permutations(shares, 2))
    return sum(a * b for a, b in pairs) / len(pairs)
