"""ARPO's experience replay (docs/methods.md): a group that fails as a whole gets one stored success of its prompt.

Each prompt keeps its last `per_prompt` successes (8; a reward above `min_success`). A fresh group whose
rewards have std < 0.05 and mean < 0.2 has its first response replaced by one of them, drawn with replacement over the
groups of the step. The memory takes the fresh successes afterwards.
Does not use: c1, c2, c3, X2, X3, `online_filter`.
"""

from __future__ import annotations

import statistics

from pydantic import Field

from bapo.algorithms.composer import AssemblyView, Decision, Reason, Rng
from bapo.algorithms.composers.fresh_only import r_tot_of, unused
from bapo.algorithms.filters import Groups
from bapo.algorithms.reward_levels import TOLERANCE
from bapo.core.batch_items import Item, Part, whole
from bapo.core.types import GroupStat, Origin
from contrib.replay_memory import KeepsPerPrompt, Row, by_prompt, first_of_each_prompt, newest, parts_of, with_fresh

MAX_STD = 0.05
"""Of the rewards of a group that fails as a whole (population standard deviation)."""
MAX_MEAN = 0.2


class Arpo(KeepsPerPrompt):
    """The composer `arpo`."""

    class Settings(KeepsPerPrompt.Settings):
        """What it keeps."""

        min_success: float = Field(0.1, ge=0, lt=1)
        """Reward above which a response is kept as a success."""

    _own: Settings

    def compose(self, view: AssemblyView, rng: Rng) -> Decision:
        """D_t: every fresh group, some with one response of the past."""
        draws = rng("inject")
        past = by_prompt(view.high)
        fresh, reasons = first_of_each_prompt(view.fresh)
        items = []
        for stat in fresh:
            groups = past.get(stat.prompt_id, [])
            successes = self._successes(groups)
            reasons[stat.group_id] = Reason.INFORMATIVE
            if not (fails_as_a_whole(stat) and successes):
                items.append(whole(Origin.X1, stat.group_id))
                continue
            injected = parts_of(groups, [successes[draws.randrange(len(successes))]])
            rest = Part(group_id=stat.group_id, rows=stat.sampled_rows[1:])
            items.append(Item(origin=Origin.X1, parts=(*injected, rest)))
            reasons[injected[0].group_id] = Reason.REPLAYED
        memory = self._with_successes(with_fresh(view.high, view.fresh, view.step))
        return Decision(
            items=tuple(items),
            r_tot=r_tot_of(self._settings, view),
            high=newest(memory, self._own.capacity),
            reasons={**unused(view), **reasons},
        )

    def _successes(self, groups: list[GroupStat]) -> list[Row]:
        """The newest successes of one prompt, oldest first."""
        rows = [(place, row) for place, stat in enumerate(groups) for row in self._successful(stat)]
        return rows[max(0, len(rows) - self._own.per_prompt) :]

    def _successful(self, stat: GroupStat) -> list[int]:
        return [row for row in stat.sampled_rows if stat.rewards[row] > self._own.min_success + TOLERANCE]

    def _with_successes(self, memory: Groups) -> Groups:
        """Without groups of which no success is among the newest of its prompt."""
        newer: dict[str, int] = {}
        kept: list[GroupStat] = []
        for stat in reversed(memory):
            number = len(self._successful(stat))
            if number and newer.get(stat.prompt_id, 0) < self._own.per_prompt:
                kept.append(stat)
            newer[stat.prompt_id] = newer.get(stat.prompt_id, 0) + number
        return tuple(reversed(kept))


def fails_as_a_whole(stat: GroupStat) -> bool:
    """std < 0.05 and mean < 0.2, of the sampled responses."""
    rewards = [stat.rewards[row] for row in stat.sampled_rows]
    return statistics.pstdev(rewards) < MAX_STD and stat.mu < MAX_MEAN
