"""RePO: replay-enhanced policy optimization, stored responses of a prompt join its fresh ones.

Each prompt keeps its last `per_prompt` responses (16: two groups of 8). When a prompt comes again and that many
are there, k = `num_rows` of them train with its fresh group, as rows of the same item:

    highest_k       the k best, the older ones first among equals
    recent_k        the k newest
    random_k        k, uniformly
    all             every one (full scope)
    max_variance_k  the k with the largest population variance of rewards, among those the larger sum

The fresh responses enter the memory after the choice. With G = 8 replay begins at a prompt's third visit. Whether
stored rows are normalized apart from fresh ones (RePO's `split`) is the loss's affair: it knows them by `replayed`.
Does not use: c1, c2, c3, X2, X3, `online_filter`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from bapo.algorithms.composer import AssemblyView, Decision, Reason, Rng
from bapo.algorithms.composers.fresh_only import r_tot_of, unused
from bapo.algorithms.randomness import sample_in_order
from bapo.algorithms.reward_levels import TOLERANCE
from bapo.core.batch_items import Item, Part
from bapo.core.types import GroupStat, Origin
from contrib.replay_memory import KeepsPerPrompt, Row, by_prompt, first_of_each_prompt, newest, parts_of, with_fresh


@dataclass(frozen=True, slots=True)
class Stored:
    """One stored response."""

    row: Row
    reward: float


class Repo(KeepsPerPrompt):
    """The composer `repo`."""

    class Settings(KeepsPerPrompt.Settings):
        """What it joins."""

        num_rows: int = Field(8, ge=1)
        """k: stored responses that are joined to a prompt's fresh ones."""
        strategy: Literal["highest_k", "recent_k", "random_k", "all", "max_variance_k"] = "highest_k"
        """Which stored responses are joined."""

    _own: Settings

    def compose(self, view: AssemblyView, rng: Rng) -> Decision:
        """D_t: every fresh group, with stored responses of its prompt where there are enough."""
        own = self._own
        draws = rng("replay")
        past = by_prompt(view.high)
        fresh, reasons = first_of_each_prompt(view.fresh)
        items = []
        for stat in fresh:
            groups = past.get(stat.prompt_id, [])
            stored = stored_responses(groups, own.per_prompt)
            chosen = []
            if len(stored) >= own.per_prompt:
                chosen = STRATEGIES[own.strategy](stored, own.num_rows, draws)
            replayed = parts_of(groups, (response.row for response in chosen))
            items.append(Item(origin=Origin.X1, parts=(Part(group_id=stat.group_id), *replayed)))
            reasons |= {part.group_id: Reason.REPLAYED for part in replayed}
            reasons[stat.group_id] = Reason.INFORMATIVE
        memory = newest(with_fresh(view.high, view.fresh, view.step), own.capacity)
        return Decision(
            items=tuple(items),
            r_tot=r_tot_of(self._settings, view),
            high=latest_responses(memory, own.per_prompt),
            reasons={**unused(view), **reasons},
        )


def stored_responses(groups: Sequence[GroupStat], most: int) -> list[Stored]:
    """The newest `most` responses of one prompt, oldest first."""
    rows = [Stored((place, row), stat.rewards[row]) for place, stat in enumerate(groups) for row in stat.sampled_rows]
    return rows[max(0, len(rows) - most) :]


def latest_responses(memory: Sequence[GroupStat], most: int) -> tuple[GroupStat, ...]:
    """The memory without groups of which no response is among the newest `most` of its prompt."""
    newer: dict[str, int] = {}
    kept: list[GroupStat] = []
    for stat in reversed(memory):
        if newer.get(stat.prompt_id, 0) < most:
            kept.append(stat)
        newer[stat.prompt_id] = newer.get(stat.prompt_id, 0) + stat.size
    return tuple(reversed(kept))


def highest_k(stored: Sequence[Stored], k: int, _: random.Random) -> list[Stored]:
    """The k best; the sort is stable, so among equals the older ones."""
    return sorted(stored, key=lambda response: -response.reward)[:k]


def recent_k(stored: Sequence[Stored], k: int, _: random.Random) -> list[Stored]:
    """The k newest, oldest first."""
    return list(stored[max(0, len(stored) - k) :])


def random_k(stored: Sequence[Stored], k: int, rng: random.Random) -> list[Stored]:
    return sample_in_order(stored, k, rng)


def every_one(stored: Sequence[Stored], _k: int, _: random.Random) -> list[Stored]:
    return list(stored)


def max_variance_k(stored: Sequence[Stored], k: int, _: random.Random) -> list[Stored]:
    """The k with the largest variance: the best i and the worst k - i, for the best i (ties: the larger sum).

    No other choice can have a larger variance, which is convex in each reward: moving one towards the farther end of
    the sorted list never lowers it.
    """
    ranked = sorted(stored, key=lambda response: -response.reward)
    k = min(k, len(ranked))
    candidates = [ranked[:i] + ranked[len(ranked) - (k - i) :] for i in range(k, -1, -1)]
    best = candidates[0]
    for candidate in candidates[1:]:
        if _variance(candidate) > _variance(best) + TOLERANCE:
            best = candidate
    return best


def _variance(responses: Sequence[Stored]) -> float:
    rewards = [response.reward for response in responses]
    mean = sum(rewards) / len(rewards)
    return sum((reward - mean) ** 2 for reward in rewards) / len(rewards)


STRATEGIES: dict[str, Callable[[Sequence[Stored], int, random.Random], list[Stored]]] = {
    "highest_k": highest_k,
    "recent_k": recent_k,
    "random_k": random_k,
    "all": every_one,
    "max_variance_k": max_variance_k,
}
