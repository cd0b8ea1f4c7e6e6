"""How many fresh groups each step takes, and which step the n-th fresh group is for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

NEVER = 1 << 62
"""A step that no run reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshSchedule:
    """A number of groups per step that changes at some steps.

    Example: phases ((1, 154), (101, 256)): ReMix with B = 256, p = 0.4 and T = 100.
    """

    phases: tuple[tuple[int, int], ...]
    """(first step, groups per step), the first of them from step 1."""

    def at(self, step: int) -> int:
        """Fresh groups of this step."""
        return next((number for first, number in reversed(self.phases) if step >= first), self.phases[0][1])

    def up_to(self, step: int) -> int:
        """Fresh groups of all steps up to this one."""
        return sum(number * max(0, min(step + 1, end) - first) for first, end, number in self._spans())

    def step_of(self, place: int) -> int:
        """Step of the fresh group at this place, from 0."""
        for first, end, number in self._spans():
            if place < number * (end - first):
                return first + place // number
            place -= number * (end - first)
        raise ValueError(f"no run has so many fresh groups: {place}")

    @property
    def most(self) -> int:
        """Fresh groups of the largest step."""
        return max(number for _, number in self.phases)

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        """(first step, step behind the last, groups per step) of each phase."""
        ends = [*(first for first, _ in self.phases[1:]), NEVER]
        for (first, number), end in zip(self.phases, ends, strict=True):
            yield first, end, number
