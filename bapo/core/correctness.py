"""What "correct" means: one rule for the table, summary, comparison, report, page, metrics and trackers.

correct       a response whose reward is the maximum, 1 (PASS_REWARD); it passes
accuracy      share of correct responses: a word for rewards in {0, 1} only
mean reward   what it says; equal to the accuracy for rewards in {0, 1}, and something else with partial credit
pass@k        share of prompts with a correct response among k, unbiased
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import comb
from typing import Any

from bapo.core.types import PASS_REWARD, SAME_REWARD, num_correct

ACCURACY = "accuracy"
MEAN_REWARD = "mean reward"
PASSES = "a response passes with reward 1"
"""The threshold of pass@k, in words."""


def has_partial_credit(rewards: Iterable[float]) -> bool:
    """Whether any reward is neither 0 nor 1."""
    return any(SAME_REWARD < reward < PASS_REWARD for reward in rewards)


def measure_of(evaluations: Iterable[Mapping[str, Any]], split: str | None = None) -> str:
    """What the mean over a split is called: "accuracy" where all its rewards are 0 or 1, else "mean reward".

    Args:
        evaluations: rows of evaluations.jsonl, all that are known: one name for all measurements of a split.
        split: None: all splits. Measurements at another temperature ("easy@0.3") have the name of their own rewards.
    """
    own = (row for row in evaluations if split is None or row["split"] == split)
    rewards = (reward for row in own for found in (row.get("rewards") or {}).values() for reward in found)
    return MEAN_REWARD if has_partial_credit(rewards) else ACCURACY


def pass_at_k(rewards: Sequence[float], k: int) -> float:
    """Unbiased estimate of the probability of a correct response among k, from n >= k: 1 - C(n - c, k) / C(n, k)
    with c correct (Chen et al., arXiv 2107.03374)."""
    size = len(rewards)
    return 1.0 - comb(size - num_correct(rewards), k) / comb(size, k)


def mean_pass_at_k(groups: Iterable[Sequence[float]], k: int) -> float | None:
    """Mean over the prompts with at least k responses; None if there are none."""
    found = [pass_at_k(rewards, k) for rewards in groups if len(rewards) >= k]
    return sum(found) / len(found) if found else None


def pass_sizes(num_samples: int) -> tuple[int, ...]:
    """k of pass@k that are shown for n responses: 1, 2, 4, ... and n."""
    powers = (1 << power for power in range(num_samples.bit_length()))
    return tuple(dict.fromkeys([*(k for k in powers if k <= num_samples), num_samples]))
