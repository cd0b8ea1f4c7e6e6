"""Prompts that move between accuracy bins, and prompts that were rescued (figures 1, 7, 13 and 15; section 5.3).

Two places to look at:

    held out    the same problems measured at several versions with n responses each: bins 0/n .. n/n
    training    the fresh groups of each prompt in data order: first visit against last visit, bins 0/G .. G/G

Rescued: no right response at first, at least one at last. A second sample of the base model "rescues" prompts too, by
chance: that share is the floor, taken from base measurements of runs with different seeds. Where the last group is a
training visit, what trained the prompt before it is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bapo.analysis.compare.gather import BASE_VERSION, Measured
from bapo.core.types import Fate, Origin, Purpose

UNTRAINED = "none of them"
"""A prompt that was rescued although no group of its own had an advantage: other prompts' training moved it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Counts of prompts by (bin at first, bin at last)."""

    counts: tuple[tuple[int, ...], ...]
    """[n + 1][n + 1]: row = right responses at first, column = right responses at last."""

    @property
    def total(self) -> int:
        """Prompts."""
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
        """Prompts above the diagonal."""
        return self._where(1)

    @property
    def worse(self) -> int:
        """Prompts below the diagonal."""
        return self._where(-1)

    @property
    def unsolved(self) -> int:
        """Prompts without a right response at first."""
        return sum(self.counts[0])

    @property
    def rescued(self) -> int:
        """Of them, those with one at last."""
        return sum(self.counts[0][1:])

    @property
    def lost(self) -> int:
        """Prompts with a right response at first and none at last."""
        return sum(row[0] for row in self.counts[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescue:
    """One training prompt that was all wrong at its first visit and visited again."""

    rescued: bool
    """At least one right at its last visit."""
    trained_by: frozenset[Origin]
    """Origins of its groups with an advantage that trained before its last visit."""
    found_by: Purpose | None
    """Why the first group with a right response was sampled; None if there never was one."""


def matrix_of(pairs: Iterable[tuple[int, int]], size: int) -> Matrix:
    """Count (bin at first, bin at last) pairs; bins 0..size."""
    found = Counter(pairs)
    return Matrix(counts=tuple(tuple(found[first, last] for last in range(size + 1)) for first in range(size + 1)))


def held_out_bins(run: Measured, split: str, version: int) -> dict[str, int]:
    """Prompt id -> right responses, as measured at one version; empty if it was not."""
    for row in run.rows(split):
        if row["version"] == version:
            return {prompt: round(sum(rewards)) for prompt, rewards in row["rewards"].items()}
    return {}


def held_out_matrix(runs: Sequence[Measured], split: str, version: int) -> Matrix | None:
    """Movement of held-out prompts from the base model to a version, all seeds together; None if not measured."""
    pairs: list[tuple[int, int]] = []
    for run in runs:
        before, after = held_out_bins(run, split, BASE_VERSION), held_out_bins(run, split, version)
        pairs += [(before[prompt], after[prompt]) for prompt in before if prompt in after]
    return matrix_of(pairs, runs[0].config.evaluation.num_samples) if pairs else None


def floor_matrix(runs: Sequence[Measured], split: str) -> Matrix | None:
    """The base model against itself: each run's base measurement against the next one's of another seed.

    None when there is only one seed. What this matrix shows is chance.
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
    return matrix_of(pairs, runs[0].config.evaluation.num_samples) if len(bases) > 1 else None


def training_matrix(runs: Sequence[Measured]) -> Matrix | None:
    """Movement of training prompts from their first fresh visit to their last; None when none came twice."""
    size = runs[0].config.algorithm.group_size
    pairs = [
        (right(visits[0][1]), right(visits[-1][1]))
        for run in runs
        for visits in fresh_visits(run.sampled).values()
        if len(visits) > 1
    ]
    return matrix_of(pairs, size) if pairs else None


def rescues(run: Measured) -> dict[str, Rescue]:
    """Prompt id -> what became of it, for training prompts that were all wrong at first and came again."""
    trained: dict[str, list[tuple[int, Origin]]] = {}
    solved_by: dict[str, Purpose] = {}
    for step, fates in run.groups:
        for fate in fates:
            if fate.origin is not None and has_advantage(fate):
                trained.setdefault(fate.prompt_id, []).append((step, fate.origin))
            if right(fate) and fate.purpose in (Purpose.FRESH, Purpose.REEVALUATE):
                solved_by.setdefault(fate.prompt_id, fate.purpose)
    found = {}
    for prompt, visits in fresh_visits(run.sampled).items():
        (_, first), (last_step, last) = visits[0], visits[-1]
        if len(visits) > 1 and right(first) == 0:
            before = frozenset(origin for step, origin in trained.get(prompt, ()) if step < last_step)
            found[prompt] = Rescue(rescued=right(last) > 0, trained_by=before, found_by=solved_by.get(prompt))
    return found


def attribution(found: Iterable[Rescue]) -> Counter[str]:
    """Rescued prompts by the origins that had trained them: "x1", "x1+x2", ..., or none."""
    return Counter(
        "+".join(sorted(origin.value for origin in rescue.trained_by)) or UNTRAINED
        for rescue in found
        if rescue.rescued
    )


def bins_by_epoch(run: Measured) -> list[list[int]]:
    """[epoch][k] fresh groups with k right responses: visit 1, 2, ... of the prompts, in the order of the data."""
    size = run.config.algorithm.group_size
    epochs: list[list[int]] = []
    for visits in fresh_visits(run.sampled).values():
        for number, (_, fate) in enumerate(visits):
            while len(epochs) <= number:
                epochs.append([0] * (size + 1))
            if len(fate.rewards) == size:
                epochs[number][right(fate)] += 1
    return epochs


def fresh_visits(sampled: Iterable[tuple[int, Sequence[Fate]]]) -> Mapping[str, list[tuple[int, Fate]]]:
    """Prompt id -> (step, group) of each time that the data order came to it."""
    visits: dict[str, list[tuple[int, Fate]]] = {}
    for step, fates in sampled:
        for fate in fates:
            if fate.purpose is Purpose.FRESH:
                visits.setdefault(fate.prompt_id, []).append((step, fate))
    return visits


def right(fate: Fate) -> int:
    """k: right responses."""
    return round(sum(fate.rewards))


def has_advantage(fate: Fate) -> bool:
    """Whether its responses differ in reward: otherwise it moves nothing."""
    return len(set(fate.rewards)) > 1
