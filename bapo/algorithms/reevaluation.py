"""Which hard prompts are re-evaluated, and how many: by what their re-evaluation is expected to gain.

    success rate of a prompt    p ~ Beta(1 + k, 1 + G - k + G (1/2 + 1/4 + ... + 1/2^attempts))
    expected gain               g = P(c1 G < K < G),  K ~ Binomial(G, p): the chance that its next group becomes X2
    budget of a round           min(1, worth q / f) of those that the paper's rule would ask, at least one

k of G is the newest group of the prompt. Of the re-evaluations before it we know that they were hard: they count as
wrong, half as much with every one, because the policy that failed them is the further away. q is the share of
re-evaluated groups that improved, f the share of fresh groups that were informative, both over the latest steps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bapo.algorithms.reward_levels import TOLERANCE
from bapo.core.types import HardPrompt

COST_STEPS = 20
"""Steps before a round from which q and f are measured."""
DECAY = 0.5
"""Weight of an older failure, per re-evaluation since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingCost:
    """What sampling has paid in the latest steps, in groups."""

    reevaluated: int = 0
    improved: int = 0
    """Of `reevaluated`: c1 < mu' < 1, whether there was room or not."""
    fresh: int = 0
    informative: int = 0
    """Of `fresh`: passed the online filter."""

    @property
    def promotion_rate(self) -> float:
        """q, with one promotion in five seen beforehand, as `expected_gain` has it for a prompt that failed once."""
        return (self.improved + 1) / (self.reevaluated + 5)

    @property
    def informative_rate(self) -> float:
        """f, with one informative group of two seen beforehand."""
        return (self.informative + 1) / (self.fresh + 2)


def cost_before(step: int, compositions: Iterable[Mapping[str, Any]]) -> SamplingCost:
    """Sums over the batches of the COST_STEPS steps before `step`, and of no others: they are committed, so that a
    scheduler that restarts finds the same."""
    lines = [line for line in compositions if step - COST_STEPS <= line["step"] < step]

    def total(key: str) -> int:
        return sum(int(line[key]) for line in lines)

    return SamplingCost(
        reevaluated=total("reevaluated"), improved=total("improved"), fresh=total("fresh"), informative=total("x1")
    )


def most_promising(
    candidates: Sequence[HardPrompt], most: int, *, group_size: int, c1: float, rng: random.Random
) -> list[str]:
    """Ids of the prompts of the largest expected gain, in the order of `candidates`; equal gains are drawn from."""
    if len(candidates) <= most:
        return [prompt.prompt_id for prompt in candidates]
    order = list(range(len(candidates)))
    rng.shuffle(order)
    gains = [expected_gain(prompt, group_size, c1) for prompt in candidates]
    best = sorted(order, key=lambda i: -gains[i])[:most]
    return [candidates[i].prompt_id for i in sorted(best)]


def expected_gain(prompt: HardPrompt, group_size: int, c1: float) -> float:
    """g: the chance that c1 < mu' < 1 in the next group of this prompt."""
    right = prompt.mu * group_size
    older = group_size * sum(DECAY**i for i in range(1, prompt.attempts + 1))
    a, b = 1 + right, 1 + group_size - right + older
    lowest = math.floor(c1 * group_size + TOLERANCE) + 1
    return sum(beta_binomial(k, group_size, a, b) for k in range(lowest, group_size))


def beta_binomial(k: int, size: int, a: float, b: float) -> float:
    """P(K = k) for K ~ Binomial(size, p) and p ~ Beta(a, b)."""
    log_choose = math.lgamma(size + 1) - math.lgamma(k + 1) - math.lgamma(size - k + 1)
    return math.exp(log_choose + _log_beta(a + k, b + size - k) - _log_beta(a, b))


def budget(most: int, worth: float, cost: SamplingCost) -> int:
    """How many of at most `most` prompts a round asks.

    Args:
        worth: of an improved hard prompt, in informative fresh groups.
    Returns: at least 1 while there is a prompt to ask, so that q is still measured.
    """
    share = min(1.0, worth * cost.promotion_rate / cost.informative_rate)
    return min(most, max(1, math.floor(most * share + TOLERANCE)))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
