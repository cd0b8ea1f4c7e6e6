"""Prompts that move between accuracy bins, and prompts that the base model fails and training solves (section 5.3).

    held out    the same problems at several versions with n responses each: bins 0/n .. n/n
    training    fresh groups of each prompt in data order: first visit against last visit, bins 0/G .. G/G of the G
                sampled responses: an expert's is none of them

A second sample of the base model solves some of its failures by chance: that share is the floor. So that chance does
not choose a population for each method, every held-out prompt has as weight the share of all base measurements in which
no response was correct: one population for all methods, which does not shrink with more runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from bapo.core.statistics import Estimate
from bapo.core.types import GroupResult, Purpose, num_correct, num_sampled, sampled_rewards
from bapo.runtime.run_directory.curves import BASE_VERSION, migrations
from studies.compare.accuracy import shared_seeds
from studies.compare.gather import Compared, Measured, Method, Row
from studies.significance import weighted


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    counts: tuple[tuple[int, ...], ...]
    """[n + 1][n + 1]: row = right responses at first, column = right responses at last."""

    @property
    def total(self) -> int:
        return sum(map(sum, self.counts))

    def _where(self, keep: int) -> int:
        return sum(
            count
            for first, row in enumerate(self.counts)
            for last, count in enumerate(row)
            if (last > first) - (last < first) == keep
        )

    @property
    def better(self) -> int:
        return self._where(1)

    @property
    def worse(self) -> int:
        return self._where(-1)


def matrix_of(pairs: Iterable[tuple[int, int]], size: int) -> Matrix:
    """Count (bin at first, bin at last) pairs; bins 0..size."""
    return Matrix(counts=migrations(pairs, size))


def held_out_bins(run: Measured, split: str, version: int) -> dict[str, int]:
    """Prompt id -> right responses, as measured at one version; empty if it was not."""
    return bins_of(next((row for row in run.rows(split) if row["version"] == version), None))


def bins_of(row: Row | None) -> dict[str, int]:
    """Prompt id -> right responses of one measurement; empty without."""
    return {} if row is None else {prompt: num_correct(rewards) for prompt, rewards in row["rewards"].items()}


def held_out_matrix(runs: Sequence[Measured], split: str) -> Matrix | None:
    """Movement of held-out prompts from the base model to each run's end, all seeds together; None if not measured."""
    pairs: list[tuple[int, int]] = []
    for run in runs:
        before, after = bins_of(run.before(split)), bins_of(run.after(split))
        pairs += [(before[prompt], after[prompt]) for prompt in before if prompt in after]
    return matrix_of(pairs, runs[0].config.evaluation.samples_of(split)) if pairs else None


LOOKS = (150 / 471, 300 / 471, 1.0)
"""Shares of the steps after which the paper looks again at the prompts that it follows (figure 15)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Where a method's held-out prompts have gone after some steps."""

    step: int
    matrix: Matrix
    """From the base model. The same prompts at every step."""


def looks(runs: Sequence[Measured], splits: Sequence[str]) -> list[Look]:
    """The measurements of a method that are nearest to the paper's three, all splits and seeds together.

    Prompts: those that every measurement used has. Empty without a measurement of the base model and a later one.
    """
    num_steps = max(run.num_steps for run in runs)
    settings = runs[0].config.evaluation
    size = settings.samples_of(splits[0])
    splits = [split for split in splits if settings.samples_of(split) == size]  # bins of k of as many responses
    common = set.intersection(*({row["version"] for row in run.rows(split)} for run in runs for split in splits))
    later = sorted(version for version in common if version > BASE_VERSION)
    if not later or BASE_VERSION not in common:
        return []
    chosen = dict.fromkeys(min(later, key=lambda v: abs(v - 1 - share * num_steps)) for share in LOOKS)
    pairs: dict[int, list[tuple[int, int]]] = {version: [] for version in chosen}
    for run in runs:
        for split in splits:
            before = held_out_bins(run, split, BASE_VERSION)
            after = {version: held_out_bins(run, split, version) for version in chosen}
            followed = [prompt for prompt in before if all(prompt in bins for bins in after.values())]
            for version, bins in after.items():
                pairs[version] += [(before[prompt], bins[prompt]) for prompt in followed]
    return [Look(step=version - 1, matrix=matrix_of(pairs[version], size)) for version in chosen if pairs[version]]


def floor_matrix(runs: Sequence[Measured], split: str) -> Matrix | None:
    """The base model against itself: each run's base measurement against the next one's of another seed.

    None when there is only one seed. What this matrix shows is chance, if all runs have one base model (`bases`).
    """
    seen: dict[int, dict[str, int]] = {}
    for run in runs:
        bins = held_out_bins(run, split, BASE_VERSION)
        if bins:
            seen.setdefault(run.seed, bins)
    bases = list(seen.values())
    pairs = [
        (before[prompt], after[prompt])
        for before, after in zip(bases, bases[1:] + bases[:1], strict=True)
        for prompt in before
        if prompt in after
    ]
    return matrix_of(pairs, runs[0].config.evaluation.samples_of(split)) if len(bases) > 1 else None


def training_matrix(runs: Sequence[Measured]) -> Matrix | None:
    """Movement of training prompts from their first fresh visit to their last; None when none came twice."""
    size = runs[0].config.algorithm.sampled_size
    pairs = [
        (num_correct(sampled_rewards(visits[0][1])), num_correct(sampled_rewards(visits[-1][1])))
        for run in runs
        for visits in fresh_visits(run.sampled).values()
        if len(visits) > 1
    ]
    return matrix_of(pairs, size) if pairs else None


def bins_by_epoch(run: Measured) -> list[list[int]]:
    """[epoch][k] fresh groups with k right responses: visit 1, 2, ... of the prompts, in the order of the data."""
    size = run.config.algorithm.sampled_size
    epochs: list[list[int]] = []
    for visits in fresh_visits(run.sampled).values():
        for number, (_, result) in enumerate(visits):
            while len(epochs) <= number:
                epochs.append([0] * (size + 1))
            if num_sampled(result) == size:
                epochs[number][num_correct(sampled_rewards(result))] += 1
    return epochs


def fresh_visits(sampled: Iterable[tuple[int, Sequence[GroupResult]]]) -> Mapping[str, list[tuple[int, GroupResult]]]:
    """Prompt id -> (step, group) of each time that the data order came to it."""
    visits: dict[str, list[tuple[int, GroupResult]]] = {}
    for step, results in sampled:
        for result in results:
            if result.purpose is Purpose.FRESH:
                visits.setdefault(result.prompt_id, []).append((step, result))
    return visits


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsolved:
    """How often the base model leaves each prompt of a split without a right response."""

    weights: Mapping[str, float]
    """Prompt id -> share of base measurements at 0/n: mean over seeds of the share of the seed's measurements."""
    twice: Mapping[str, float]
    """Prompt id -> chance that two measurements of different seeds are both at 0/n; empty with one seed."""

    @property
    def size(self) -> float:
        return sum(self.weights.values())


def unsolved(runs: Iterable[Measured], split: str) -> Unsolved | None:
    """The population of runs with one base model; None where it solved everything or was not measured.

    Measurements of runs with the same seed are not independent samples of each other: their engines start alike.
    """
    by_seed: dict[int, list[Mapping[str, int]]] = {}
    measured = []
    for run in runs:
        base, final = bins_of(run.before(split)), bins_of(run.after(split))
        if base:
            by_seed.setdefault(run.seed, []).append(base)
        measured += [counts for counts in (base, final) if counts]
    prompts = [prompt for prompt in measured[0] if all(prompt in counts for counts in measured)] if by_seed else []
    failed = {p: [sum(counts[p] == 0 for counts in own) / len(own) for own in by_seed.values()] for p in prompts}
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
    return _estimate_over(tables, population) if tables else None


def above_floor(method: Method, split: str, population: Unsolved) -> Estimate | None:
    """`rescued` less `floor`, on the same prompts; None without either."""
    again = _solved_again(population)
    tables = [table for run in method.runs if (table := _solved(run, split, population))]
    if not again or not tables:
        return None
    return _estimate_over([[x - y for x, y in zip(table, again, strict=True)] for table in tables], population)


def rescued_more(method: Method, reference: Method, split: str, population: Unsolved) -> Estimate | None:
    """`rescued` of a method less that of a reference, paired by seed and prompt; None without a shared seed."""
    pairs = ((_solved(a, split, population), _solved(b, split, population)) for a, b in shared_seeds(method, reference))
    tables = [[x - y for x, y in zip(ours, theirs, strict=True)] for ours, theirs in pairs if ours and theirs]
    return _estimate_over(tables, population) if tables else None


def base_of(run: Measured) -> str:
    """Its base model by all that its measurements depend on: not by how it is trained."""
    model = run.config.model
    parts = (model.path, model.dtype, model.adapter, model.max_image_pixels)
    return ", ".join(str(part) for part in parts if part is not None)


def bases(compared: Compared) -> dict[str, list[Measured]]:
    """Base model -> the runs that started from it: what is said of a base model is of these alone."""
    found: dict[str, list[Measured]] = {}
    for run in (run for method in compared.methods for run in method.runs):
        found.setdefault(base_of(run), []).append(run)
    return found


def named_bases(compared: Compared) -> dict[str, list[Measured]]:
    """`bases` by their names in tables and figures: "base model", and which one where there are several."""
    found = bases(compared)
    return {"base model" if len(found) == 1 else f"base model ({base})": runs for base, runs in found.items()}


def _solved(run: Measured, split: str, population: Unsolved) -> list[float]:
    """[P] weight of each prompt with a right response after training, else 0; empty if it was not measured."""
    counts = bins_of(run.after(split))
    return [weight * (counts[prompt] > 0) for prompt, weight in population.weights.items()] if counts else []


def _solved_again(population: Unsolved) -> list[float]:
    """[P] chance of a prompt to be at 0/n first and not a second time; empty with one seed."""
    return [weight - population.twice[p] for p, weight in population.weights.items()] if population.twice else []


def _estimate_over(tables: Sequence[Sequence[float]], population: Unsolved) -> Estimate | None:
    weights = list(population.weights.values())
    return weighted(tables, weights) if len(weights) > 1 else None


def _both(shares: Sequence[float]) -> float:
    """Mean product over ordered pairs of different seeds."""
    pairs = list(permutations(shares, 2))
    return sum(a * b for a, b in pairs) / len(pairs)
