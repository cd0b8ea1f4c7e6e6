"""How old the entries of B_bad and B_high were after each step. A fold that replays the composer over the records.

Tables are not recorded (ADR 0086): they follow from the groups, the settings and the seed. Where the replay gives other
sizes than the run recorded, or the groups of a step are not known, ages are unknown from there on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bapo.config.tree import Config
from bapo.errors import BapoError
from bapo.whatif.recording import RecordedStep
from bapo.whatif.simulation import SimulatedStep, replayed

LAST_AGES = (0, 1, 2, 3, 5, 10, 20, 50)
"""Upper ends of the ranges of age, in steps; what is older has a range of its own."""


class TableAges:
    """Entries of both tables by range of age."""

    def __init__(self, config: Config) -> None:
        self._next: RecordedStep | None = None
        self._replay: Iterator[SimulatedStep] | None = replayed(self._coming(), config)
        self._rows: list[tuple[list[int] | None, list[int] | None, int | None, int | None]] = []

    def advance(self, step: RecordedStep) -> None:
        """Take one step."""
        self._rows.append(self._row(step))

    def columns(self, first: int) -> dict[str, list[Any]]:
        """
        bad_ages, high_ages       [ranges] entries after the step, by `LAST_AGES`; null where they are unknown
        bad_oldest, high_oldest   age of the oldest; null where there is none
        """
        rows = self._rows[first:]
        names = ("bad_ages", "high_ages", "bad_oldest", "high_oldest")
        return {name: [row[index] for row in rows] for index, name in enumerate(names)}

    def _row(self, step: RecordedStep) -> tuple[list[int] | None, list[int] | None, int | None, int | None]:
        found = self._replayed(step)
        if found is None:
            return None, None, None, None
        bad = [step.step - entry.birth for entry in found.decision.bad]
        high = [step.step - stat.birth for stat in found.decision.high]
        return by_range(bad), by_range(high), max(bad, default=None), max(high, default=None)

    def _replayed(self, step: RecordedStep) -> SimulatedStep | None:
        """The step again; None, then and for ever, when it comes out differently."""
        if self._replay is None:
            return None
        self._next = step
        try:
            found = next(self._replay) if step.fates else None
        except (BapoError, ArithmeticError, LookupError, ValueError):  # the composer cannot do with what is recorded
            found = None
        if found is None or not agrees(found, step):
            self._replay = None
            return None
        return found

    def _coming(self) -> Iterator[RecordedStep]:
        while self._next is not None:
            yield self._next


def agrees(found: SimulatedStep, step: RecordedStep) -> bool:
    """Whether the tables are as large as the run recorded them."""
    row = step.metrics or {}
    sizes = {"num_bad": len(found.decision.bad), "num_high": len(found.decision.high)}
    return all(row.get(name, size) == size for name, size in sizes.items())


def by_range(ages: Iterable[int], ends: Sequence[int] = LAST_AGES) -> list[int]:
    """[len(ends) + 1] how many ages lie in each range."""
    counts = [0] * (len(ends) + 1)
    for age in ages:
        counts[bisect_left(ends, age)] += 1
    return counts
