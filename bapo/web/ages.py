"""How old the entries of B_bad and B_high were after each step, from the tables that a run's history replays.

Tables are not recorded (ADR 0086): they follow from the groups, the settings and the seed. Where the replay differs
from the run, or the groups of a step are not known, ages are unknown from there on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from bapo.algorithms.composer import Decision
from bapo.whatif.history import History

LAST_AGES = (0, 1, 2, 3, 5, 10, 20, 50)
"""Upper ends of the ranges of age, in steps; what is older has a range of its own."""

Row = tuple[list[int] | None, list[int] | None, int | None, int | None]


def table_ages(history: History, first: int) -> dict[str, list[Any]]:
    """Of the steps behind the first `first` ones:

    bad_ages, high_ages       [ranges] entries after the step, by `LAST_AGES`; null where they are unknown
    bad_oldest, high_oldest   age of the oldest; null where there is none
    """
    rows = [_row(step, decision) for step, decision in history.decisions(first)]
    names = ("bad_ages", "high_ages", "bad_oldest", "high_oldest")
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


def _row(step: int, decision: Decision | None) -> Row:
    if decision is None:
        return None, None, None, None
    bad = [step - entry.birth for entry in decision.bad]
    high = [step - stat.birth for stat in decision.high]
    return by_range(bad), by_range(high), max(bad, default=None), max(high, default=None)


def by_range(ages: Iterable[int], ends: Sequence[int] = LAST_AGES) -> list[int]:
    """[len(ends) + 1] how many ages lie in each range."""
    counts = [0] * (len(ends) + 1)
    for age in ages:
        counts[bisect_left(ends, age)] += 1
    return counts
