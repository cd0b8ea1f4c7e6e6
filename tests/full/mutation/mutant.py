"""What a mutant is."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

NOT_IN_KEYS = ("@@", "---", "+++", " from ", " import ")
"""Imports change too often to name a mutant by them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One file with one small bug."""

    path: str
    """Relative to the repository."""
    operator: str
    before: str
    after: str
    """The whole file, in the form that the operator works on."""

    @property
    def changes(self) -> list[str]:
        """The lines that differ, stripped: `- old` and `+ new`."""
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), lineterm="", n=0)
        return [f"{line[0]} {line[1:].strip()}" for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]

    @property
    def diff(self) -> str:
        """For people."""
        lines = difflib.unified_diff(
            self.before.splitlines(), self.after.splitlines(), self.path, self.operator, lineterm="", n=2
        )
        return "\n".join(lines)

    @property
    def key(self) -> str:
        """Names the mutant as long as the lines that it changes, and their surroundings, stay as they are."""
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), lineterm="", n=1)
        return "\n".join([self.path, *(line for line in lines if not line.startswith(NOT_IN_KEYS))]).strip()
