"""Experiment trackers: what one is, and how it is found by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from bapo.config.tracking import TrackingConfig
from bapo.core.errors import ConfigError, did_you_mean
from bapo.core.plugins import plugin, plugin_names

FACTORY = "make_tracker"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What a tracker is made from."""

    name: str
    folder: Path
    """For its own files; it exists."""
    settings: TrackingConfig
    config: Mapping[str, Any]
    """The resolved configuration of the run, nested."""
    tracker_id: str | None = None
    """What an earlier tracker of this run had as its `tracker_id`: resume that one."""
    num_sent: int = 0
    """Rows that it has."""


class Tracker(Protocol):
    """Where numbers are sent. May raise anything: it is an external service."""

    @property
    def tracker_id(self) -> str | None:
        """Under which a later process resumes it; None: it starts over, and gets all rows again."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def log_responses(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table of texts and numbers, a row per response."""
        ...

    def close(self, *, is_complete: bool) -> None:
        """Return when everything is sent. `is_complete`: the run has trained all its steps."""
        ...


def load_tracker(name: str, run: TrackedRun) -> Tracker:
    """Start or resume the tracker of that name. Raises: ConfigError as `refuse_unusable`."""
    refuse_unusable([name], run.settings)
    return cast(Tracker, getattr(plugin(__package__, name), FACTORY)(run))


def refuse_unusable(names: Iterable[str], settings: TrackingConfig) -> None:
    """Check trackers before anything starts, without importing their packages (a second each).

    Raises: ConfigError for an unknown one, and for a missing package or login, with the command that provides it.
    """
    for name in names:
        if name not in tracker_names():
            near, known = did_you_mean(name, tracker_names()), ", ".join(tracker_names())
            raise ConfigError(f"tracker {name!r}: there is no such tracker{near}; {known}")
        if problem := plugin(__package__, name).problem(settings):
            raise ConfigError(f"tracker {name!r} {problem}")


def missing_package(package: str, *modules: str) -> str | None:
    """What to say when a module is not installed; None when all are.

    Args:
        package: its name for pip.
    """
    missing = ", ".join(module for module in modules if importlib.util.find_spec(module) is None)
    return f"requires the package {package} (no module {missing}): pip install {package}" if missing else None


def tracker_names() -> tuple[str, ...]:
    """Names of the files of this folder that make a tracker, sorted."""
    return plugin_names(__package__, FACTORY)
