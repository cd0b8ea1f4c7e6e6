"""Second looks at hard prompts, by the age of the failure, next to what chance gives.

A prompt that failed (mu <= c1) may succeed at its re-evaluation (c1 < mu' < 1) though the policy is the same: its first
group was bad luck. The floor is the share of such successes with the weights that failed:

    fresh groups of the steps around the failure --EM--> distribution of the pass rate p on a grid
    floor = E_p[P(mu <= c1) P(c1 < mu' < 1)] / E_p[P(mu <= c1)]         two independent groups of the same p

Needs no additional responses. k counts responses with a reward of 1, and mu stands for k / G.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import comb

import numpy as np
from numpy.typing import NDArray

from bapo.algorithms.reward_levels import TOLERANCE
from bapo.core.statistics import Estimate, estimate
from bapo.core.types import Purpose, num_correct, num_sampled, sampled_rewards
from studies.compare.gather import Measured

Floats = NDArray[np.float64]
ANY = 1 << 30
AGES = ((0, 0), (1, 1), (2, 4), (5, 9), (10, ANY))
"""Bins: learner steps between the policies of the failure and of the re-evaluation, both ends included."""
AROUND = 5
"""Steps before and after the failure whose fresh groups give the distribution of pass rates."""
GRID = np.concatenate([[5e-4], np.linspace(0.01, 0.99, 50), [1 - 5e-4]])
ITERATIONS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondLooks:
    """Re-evaluations whose prompt failed this many learner steps before."""

    oldest: int
    youngest: int
    num: int
    improved: Estimate
    floor: float

    @property
    def ages(self) -> str:
        """ "1", "2 to 4" or "10 or more"."""
        if self.oldest == ANY:
            return f"{self.youngest} or more"
        return str(self.youngest) if self.youngest == self.oldest else f"{self.youngest} to {self.oldest}"


def second_looks(runs: Sequence[Measured]) -> list[SecondLooks]:
    """One entry per bin of AGES with a re-evaluation, over all runs; empty without re-evaluations."""
    rows = [row for run in runs for row in _rows(run)]
    found = []
    for youngest, oldest in AGES:
        chosen = [(improved, floor) for age, improved, floor in rows if youngest <= age <= oldest]
        if chosen:
            found.append(
                SecondLooks(
                    oldest=oldest,
                    youngest=youngest,
                    num=len(chosen),
                    improved=estimate([float(improved) for improved, _ in chosen]),
                    floor=sum(floor for _, floor in chosen) / len(chosen),
                )
            )
    return found


def _rows(run: Measured) -> Iterator[tuple[int, bool, float]]:
    """(learner steps since the failure, whether it improved, floor) of each re-evaluation after a failure."""
    c1, size = run.config.algorithm.c1, run.config.algorithm.sampled_size
    last_hard = int(c1 * size + TOLERANCE)
    levels = _fresh_levels(run, size)
    floor_at = cache(lambda step, num_failures: _floor_at(step, levels, last_hard, num_failures))
    failures: dict[str, tuple[int, int, int]] = {}
    """Prompt id -> step and policy version of its last failure, and failures in a row."""
    for step, results in run.sampled:
        for result in results:
            if num_sampled(result) != size or result.purpose is Purpose.EVALUATE:
                continue
            k = num_correct(sampled_rewards(result))
            failure = failures.get(result.prompt_id)
            if result.purpose is Purpose.REEVALUATE and failure is not None:
                failed_at, version, num_failures = failure
                yield result.policy_version - version, last_hard < k < size, floor_at(failed_at, num_failures)
            failures.pop(result.prompt_id, None)
            if k <= last_hard:
                failures[result.prompt_id] = (step, result.policy_version, 1 + (failure[2] if failure else 0))


def _fresh_levels(run: Measured, size: int) -> dict[int, Floats]:
    """Step -> [G + 1] number of fresh groups with k correct responses."""
    found: dict[int, Floats] = {}
    for step, results in run.sampled:
        fresh = [r for r in results if r.purpose is Purpose.FRESH and num_sampled(r) == size]
        correct = [num_correct(sampled_rewards(result)) for result in fresh]
        found[step] = np.bincount(correct, minlength=size + 1).astype(np.float64)
    return found


def _floor_at(step: int, levels: dict[int, Floats], last_hard: int, num_failures: int) -> float:
    around = [counts for other, counts in levels.items() if abs(other - step) <= AROUND]
    return floor_of(tuple(np.sum(around, axis=0).tolist()), last_hard, num_failures)


def floor_of(counts: tuple[float, ...], last_hard: int, num_failures: int = 1) -> float:
    """Share of prompts with at most `last_hard` correct responses that have more, but not all, in the next group.

    Args:
        counts: [G + 1] number of groups with k correct responses, at least one in all.
        num_failures: groups in a row with at most `last_hard`, at one pass rate: the more, the lower it is.
    """
    likelihood = level_probabilities(len(counts) - 1)
    weight = pass_rate_weights(np.array(counts), likelihood)
    hard = likelihood[: last_hard + 1].sum(axis=0) ** num_failures
    improved = likelihood[last_hard + 1 : -1].sum(axis=0)
    return float((weight * hard * improved).sum() / (weight * hard).sum())


def level_probabilities(size: int) -> Floats:
    """[G + 1, grid] P(k of G correct) at each pass rate of the grid."""
    k = np.arange(size + 1)[:, None]
    ways = np.array([comb(size, i) for i in range(size + 1)], dtype=np.float64)[:, None]
    probabilities: Floats = ways * GRID**k * (1 - GRID) ** (size - k)
    return probabilities


def pass_rate_weights(counts: Floats, likelihood: Floats) -> Floats:
    """[grid] the distribution of pass rates that makes the counts most likely (EM from the uniform one)."""
    share = counts / counts.sum()
    weight = np.full(likelihood.shape[1], 1 / likelihood.shape[1])
    for _ in range(ITERATIONS):
        joint = likelihood * weight
        weight = (share[:, None] * joint / joint.sum(axis=1, keepdims=True)).sum(axis=0)
    return weight
