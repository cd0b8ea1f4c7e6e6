"""Experiment trackers: what one is, how it is found by name, and how the records of a run reach it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import bapo.analysis.trackers
from bapo.core.errors import ConfigError, did_you_mean
from bapo.core.types import Version
from bapo.runtime.run_directory.files import Lines
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.rows import EvaluationRow, MetricsRow

FACTORY = "make_tracker"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    name: str
    folder: Path
    """Where it may keep files of its own."""
    project: str
    config: Mapping[str, Any]


class Tracker(Protocol):
    """Where numbers go. May raise anything: it is an external service."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        """Everything is sent when this returns."""
        ...


def load_tracker(name: str, run: TrackedRun) -> Tracker:
    """The tracker of that name, begun. Raises: ConfigError for an unknown one, or when its package is missing."""
    if name not in tracker_names():
        known = ", ".join(tracker_names())
        raise ConfigError(f"--to {name!r}: there is no such tracker{did_you_mean(name, tracker_names())}; {known}")
    module = _module(name)
    try:
        return cast(Tracker, getattr(module, FACTORY)(run))
    except ImportError as error:
        raise ConfigError(f"--to {name} needs the package {module.PACKAGE}: pip install {module.PACKAGE}") from error


@cache
def tracker_names() -> tuple[str, ...]:
    """Names of the files of this folder that make a tracker, sorted."""
    names = (module.name for module in pkgutil.iter_modules(bapo.analysis.trackers.__path__))
    return tuple(sorted(name for name in names if hasattr(_module(name), FACTORY)))


def _module(name: str) -> Any:
    return importlib.import_module(f"{bapo.analysis.trackers.__name__}.{name}")


class _MeasuredRow(EvaluationRow, kw_only=True):
    split: str
    step: Version


class Sender:
    """Follows one run. Raises, everywhere: ContractError for records that cannot be read."""

    def __init__(self, run: RunDirectory, tracker: Tracker) -> None:
        self._run, self._tracker = run, tracker
        self._sent: dict[tuple[str, int], Mapping[str, float]] = {}
        self._begin()

    def _begin(self) -> None:
        self._steps = Lines(self._run.path / "metrics.jsonl", MetricsRow)
        self._measured = Lines(self._run.path / "evaluations.jsonl", _MeasuredRow)

    def send_new(self) -> int:
        """Send what is new since the last call; the number of rows sent.

        A resumed run writes the steps after its checkpoint again: those that came out differently are sent again.
        """
        if self._steps.is_another_file() or self._measured.is_another_file():
            self._begin()
        rows = [(("", row["step"]), numbers_of(row)) for row in self._steps.read()]
        rows += [((row["split"], row["step"]), measured(row)) for row in self._measured.read()]
        new = [(key, values) for key, values in rows if self._sent.get(key) != values]
        for key, values in new:
            self._tracker.log(key[1], values)
            self._sent[key] = values
        return len(new)


def numbers_of(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a step, those of inner maps as `outer/inner`; lists, texts and what is unknown are left out."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found.update(numbers_of(value, f"{prefix}{name}/"))
        elif isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63):
            found[f"{prefix}{name}"] = float(value)
    return found


def measured(row: Mapping[str, Any]) -> dict[str, float]:
    names = ("accuracy", "low", "high", "mean_tokens", "truncated_share")
    return {f"{row['split']}/{name}": float(row[name]) for name in names if row.get(name) is not None}
