"""What a tracker is, and how one is found by name."""

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

FACTORY = "make_tracker"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What a tracker is told of a run before its first step."""

    name: str
    folder: Path
    """Where it may keep files of its own."""
    project: str
    config: Mapping[str, Any]
    """The resolved configuration."""


class Tracker(Protocol):
    """Where numbers go. May raise anything: it is somebody else's service."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one learner step, or measured at it."""
        ...

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
