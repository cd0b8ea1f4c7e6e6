"""How training prompts move between accuracy bins, and which were rescued (figures 7 and 15; ADR 0080). A pure fold.

The same counting as `bapo.comparison.migration`, step by step: of each prompt its first fresh visit, its last one, and
the origins that trained it in between are kept, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from bapo.comparison.migration import UNTRAINED, has_advantage, right
from bapo.config.tree import Config
from bapo.types import Fate, Origin, Purpose
from bapo.web.steps import number
from bapo.whatif.recording import RecordedStep

COLUMNS = (
    "bins",
    "moved",
    "revisited",
    "unsolved",
    "rescued",
    "attribution",
    "reasons",
    "sample_s",
    "grade_s",
    "new_groups",
    "workers",
)


@dataclass(slots=True)
class Seen:
    """One prompt so far."""

    first: int
    """k at its first fresh visit."""
    last: int
    is_revisited: bool = False
    trained_by: set[Origin] = field(default_factory=set)
    """Origins of its groups with an advantage, trained in steps before now."""
    label: str = ""
    """Under which it counts as rescued now; empty: it is not."""


class PromptVisits:
    """The prompts of a run, and per step what changed."""

    def __init__(self, config: Config) -> None:
        self._size = config.algorithm.group_size
        self._prompts: dict[str, Seen] = {}
        self._revisited = self._unsolved = 0
        self._rescued: Counter[str] = Counter()
        self._rows: list[list[Any]] = []

    def advance(self, step: RecordedStep) -> None:
        """Take one step: its visits first, then what it trained."""
        new = list({fate.group_id: fate for fate in step.fates if fate.birth == step.step}.values())
        visits = [fate for fate in new if fate.purpose is Purpose.FRESH and len(fate.rewards) == self._size]
        bins = Counter(map(right, visits))
        moved: Counter[int] = Counter()
        for fate in visits:
            self._visit(fate, moved)
        for fate in step.fates:
            if fate.origin is not None and has_advantage(fate) and fate.prompt_id in self._prompts:
                self._prompts[fate.prompt_id].trained_by.add(fate.origin)
        self._rows.append([
            [bins[k] for k in range(self._size + 1)] if step.fates else None,
            [number for cell, change in sorted(moved.items()) if change for number in (cell, change)],
            self._revisited,
            self._unsolved,
            self._rescued.total(),
            {label: count for label, count in sorted(self._rescued.items()) if count},
            dict(Counter(fate.reason for fate in step.fates).most_common()),
            number(sum(fate.sample_s for fate in new)),
            number(sum(fate.grade_s for fate in new)),
            len(new),
            len({fate.worker_id for fate in new if fate.worker_id}),
        ])  # fmt: skip

    def columns(self, first: int) -> dict[str, list[Any]]:
        """
        bins         [G + 1] fresh groups of the step with k right responses (Fig. 7); null where groups are not known
        moved        changes of the migration matrix: cell, change, cell, change ...; a cell is first * (G + 1) + last
        revisited    prompts that came at least twice so far: the sum of the matrix
        unsolved     of them, those without a right response at first
        rescued      of those, with one at last; `attribution`: the same by the origins that trained them in between
        reasons      what became of every group that the assembly looked at
        sample_s, grade_s   seconds that the groups took that were new in this step, `new_groups` many, of `workers`
        """
        rows = self._rows[first:]
        return {name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)}

    def _visit(self, fate: Fate, moved: Counter[int]) -> None:
        now = right(fate)
        seen = self._prompts.get(fate.prompt_id)
        if seen is None:
            self._prompts[fate.prompt_id] = Seen(first=now, last=now)
            return
        if seen.is_revisited:
            moved[self._cell(seen)] -= 1
        else:
            seen.is_revisited = True
            self._revisited += 1
            self._unsolved += seen.first == 0
        seen.last = now
        moved[self._cell(seen)] += 1
        self._count_rescue(seen)

    def _count_rescue(self, seen: Seen) -> None:
        """A rescued prompt that is all wrong again is rescued no more."""
        if seen.label:
            self._rescued[seen.label] -= 1
        trained = "+".join(sorted(origin.value for origin in seen.trained_by)) or UNTRAINED
        seen.label = trained if seen.first == 0 and seen.last > 0 else ""
        if seen.label:
            self._rescued[seen.label] += 1

    def _cell(self, seen: Seen) -> int:
        return seen.first * (self._size + 1) + seen.last
