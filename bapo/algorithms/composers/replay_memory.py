"""What replay composers share: groups that are kept over steps, oldest first, and rows picked from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bapo.algorithms.composer import Reason
from bapo.algorithms.filters import Groups
from bapo.core.batch_items import Part
from bapo.core.types import GroupStat

Row = tuple[int, int]
"""(place of the group, row of it)."""


def with_fresh(memory: Iterable[GroupStat], fresh: Iterable[GroupStat], step: int) -> Groups:
    """The memory and after it the fresh groups, born in this step."""
    return (*memory, *(stat.born(step) for stat in fresh))


def newest(memory: Groups, capacity: int | None) -> Groups:
    """First in, first out: at most `capacity` groups; None: all."""
    return memory if capacity is None else memory[max(0, len(memory) - capacity) :]


def once_per_prompt(memory: Iterable[GroupStat]) -> Groups:
    """The newest group of each prompt, in the order of their births."""
    latest: dict[str, GroupStat] = {}
    for stat in memory:
        latest.pop(stat.prompt_id, None)
        latest[stat.prompt_id] = stat
    return tuple(latest.values())


def by_prompt(memory: Iterable[GroupStat]) -> dict[str, list[GroupStat]]:
    """Prompt id -> its groups, oldest first."""
    found: dict[str, list[GroupStat]] = {}
    for stat in memory:
        found.setdefault(stat.prompt_id, []).append(stat)
    return found


def first_of_each_prompt(fresh: Iterable[GroupStat]) -> tuple[Groups, dict[str, str]]:
    """The fresh groups without repeated prompts, and the reason of each that is left out."""
    found: dict[str, GroupStat] = {}
    left_out: dict[str, str] = {}
    for stat in fresh:
        if found.setdefault(stat.prompt_id, stat) is not stat:
            left_out[stat.group_id] = Reason.DUPLICATE_PROMPT
    return tuple(found.values()), left_out


def parts_of(groups: Sequence[GroupStat], rows: Iterable[Row]) -> tuple[Part, ...]:
    """Rows of several groups as parts, each group once, in the order of its first row."""
    chosen: dict[int, list[int]] = {}
    for place, row in rows:
        chosen.setdefault(place, []).append(row)
    return tuple(Part(group_id=groups[place].group_id, rows=tuple(found)) for place, found in chosen.items())
