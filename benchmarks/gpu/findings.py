"""Figures of one item. The file is written at each of them: an item that is ended by its time limit keeps them."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
from pathlib import Path
from typing import Any


class SkippedError(Exception):
    """The item cannot run here; the message says what is missing."""


class Findings:
    """Name -> figure, and goals: name -> value, limit and whether it was reached."""

    def __init__(self, path: Path, work: Path) -> None:
        """`work`: an empty folder for models and run directories."""
        self._path = path
        self.work = work
        self.figures: dict[str, Any] = {}
        self.goals: dict[str, dict[str, Any]] = {}

    def add(self, **figures: Any) -> None:
        """Record figures; floats are rounded to four significant digits."""
        self.figures |= {name: rounded(value) for name, value in figures.items()}
        self._write()

    def goal(self, name: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> bool:
        """Record a figure and whether it reaches its goal; a goal that is missed does not fail the item."""
        met = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
        limit = f">= {at_least:g}" if at_least is not None else f"<= {at_most:g}"
        self.goals[name] = {"value": rounded(value), "limit": limit, "met": met}
        self.add(**{name: value})
        return met

    def require(self, name: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> None:
        """A goal without which the figures mean nothing. Raises: ValueError if it is missed."""
        if not self.goal(name, value, at_least=at_least, at_most=at_most):
            raise ValueError(f"{name} is {rounded(value)}, required {self.goals[name]['limit']}")

    def keep(self, file: Path) -> None:
        """Copy a file of `work`, which is deleted, next to result.json, if it is there."""
        if file.exists():
            shutil.copyfile(file, self._path.with_name(f"{self._path.stem}-{file.name}"))

    def add_distributions(self) -> None:
        """Record which installed packages this process has imported: `pack` carries those that a machine lacks."""
        owners = importlib.metadata.packages_distributions()
        names = {module.partition(".")[0] for module in sys.modules}
        self.add(distributions=sorted({owner for name in names for owner in owners.get(name, ())}))

    def _write(self) -> None:
        self._path.write_text(json.dumps({"figures": self.figures, "goals": self.goals}, indent=1))


def rounded(value: Any) -> Any:
    """Floats to four significant digits, also within lists and tables."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, list | tuple) else value
