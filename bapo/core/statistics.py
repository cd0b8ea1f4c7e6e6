"""Accuracy with its uncertainty: responses of one prompt are alike, so prompts are the independent unit.

`estimate`   mean accuracy and its 95 % Wilson interval with the effective sample size of clustered responses:
             n_eff = p (1 - p) / Var(mean of prompt means), the number of independent responses that would be as
             uncertain. Unlike a bootstrap it is deterministic and has no width of zero at 0 % and 100 %.
`shared_means` what of several measurements may be compared: the prompts that all of them have; `over_shared` two of
             them as if no other prompt had been measured.
`difference` mean change over the same prompts with its 95 % interval (paired, normal): what training moved.

Does not cover: which of many differences is real when many are inspected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Z95 = 1.959964
"""97.5 % quantile of the normal distribution."""

INTERVAL = "95% wilson, clustered by prompt"
"""How an interval was made: written with it into every evaluation."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def in_points(self) -> str:
        """A difference in percentage points: "+7.4 [+4.0, +10.8]"."""
        return f"{100 * self.mean:+.1f} [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"


def estimate(prompt_means: Sequence[float]) -> Estimate:
    """Mean accuracy of prompts whose own means are given.

    Args:
        prompt_means: [N] mean reward in [0, 1] of each prompt's responses.
    Raises: ValueError when there are none.
    """
    n = len(prompt_means)
    if n == 0:
        raise ValueError("cannot compute accuracy without prompts")
    mean = sum(prompt_means) / n
    return Estimate(mean, *_wilson(mean, _effective_size(prompt_means, mean)))


def shared_means(rewards: Sequence[Mapping[str, Sequence[float]]]) -> list[list[float]]:
    """[K][N] mean reward of each prompt that all K measurements have, in one order: what may be compared.

    Args:
        rewards: [K] prompt id -> rewards of its responses; at least one measurement.
    """
    shared = [prompt_id for prompt_id in rewards[0] if all(prompt_id in other for other in rewards[1:])]
    return [[sum(one[prompt_id]) / len(one[prompt_id]) for prompt_id in shared] for one in rewards]


def difference(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Mean of after - before over the same prompts, in the same order.

    Raises: ValueError when they are not as many, or fewer than two.
    """
    if len(before) != len(after) or len(before) < 2:
        raise ValueError(f"a paired difference needs at least two common prompts, got {len(before)} and {len(after)}")
    changes = [b - a for a, b in zip(before, after, strict=True)]
    mean = sum(changes) / len(changes)
    variance = sum((change - mean) ** 2 for change in changes) / (len(changes) - 1)
    half = Z95 * math.sqrt(variance / len(changes))
    return Estimate(mean, mean - half, mean + half)


def change(first: Mapping[str, Any], last: Mapping[str, Any]) -> Estimate | None:
    """`difference` of two rows of evaluations.jsonl over the prompts common to both; None for fewer than two."""
    before, after = shared_means([first["rewards"], last["rewards"]])
    return difference(before, after) if len(before) > 1 else None


def over_shared(first: Mapping[str, Any], last: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Two rows of evaluations.jsonl with rewards, mean and interval over the prompts common to both; as they are where
    they have none."""
    shared = [prompt_id for prompt_id in first["rewards"] if prompt_id in last["rewards"]]
    return _restricted(first, shared), _restricted(last, shared)


def _restricted(row: Mapping[str, Any], prompt_ids: Sequence[str]) -> Mapping[str, Any]:
    if len(prompt_ids) in (0, len(row["rewards"])):
        return row
    rewards = {prompt_id: row["rewards"][prompt_id] for prompt_id in prompt_ids}
    found = estimate([sum(own) / len(own) for own in rewards.values()])
    interval = {"accuracy": found.mean, "low": found.low, "high": found.high, "interval": INTERVAL}
    return {**row, **interval, "num_prompts": len(rewards), "rewards": rewards}


def _effective_size(prompt_means: Sequence[float], mean: float) -> float:
    n = len(prompt_means)
    # Population variance: with one response per prompt, the effective size is then exactly n.
    spread = sum((value - mean) ** 2 for value in prompt_means) / n
    # All alike: the spread says nothing, and each prompt counts once.
    return n if spread < 1e-18 else n * mean * (1 - mean) / spread


def _wilson(p: float, n: float) -> tuple[float, float]:
    """Wilson score interval of a share p of n independent trials."""
    scale = 1 + Z95**2 / n
    centre = (p + Z95**2 / (2 * n)) / scale
    half = Z95 / scale * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n))
    # Exactly 0 or 1 where the observed share is: rounding would leave 1e-18.
    low = 0.0 if p == 0.0 else max(0.0, centre - half)
    high = 1.0 if p == 1.0 else min(1.0, centre + half)
    return low, high
