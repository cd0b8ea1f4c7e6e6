"""A run directory whose start failed before the first step: its name is free again, and its records and logs are kept.

    NAME  --trained nothing, and nothing runs in it-->  NAME.failed-1, NAME.failed-2, ...

A directory that no launcher has started (`bapo create`) is never moved: its processes may run elsewhere.
"""

from __future__ import annotations

from pathlib import Path

from bapo.core.errors import BapoError, ConfigError
from bapo.runtime.run_directory.files import locked, storing
from bapo.runtime.run_directory.layout import UNDER_WAY, RunDirectory

ENDED = ("failed", "interrupted")


def has_trained(run: RunDirectory) -> bool:
    """Whether the records have a step, or there is a checkpoint; damaged records count as trained."""
    if any((run.path / "checkpoints").glob("step-*")):
        return True
    try:
        return bool(run.read_metrics())
    except BapoError:
        return True


def can_be_replaced(run: RunDirectory) -> bool:
    """Whether a new run may take the name: nothing was trained under it, and nothing is in progress."""
    try:
        fields = run.read_run()
        if run.is_under_way or has_trained(run):
            return False
    except BapoError:
        return False
    return fields.get("status") in (*UNDER_WAY, *ENDED)


def set_aside(run: RunDirectory) -> Path | None:
    """Rename the directory of a run that trained nothing; returns its new path, None if it is left as it is.

    Raises: StorageError.
    """
    if not can_be_replaced(run):
        return None
    number = 1
    while (path := run.path.with_name(f"{run.name}.failed-{number}")).exists():
        number += 1
    try:
        with locked(run.path / ".lock", "in use"), storing(run.path):
            run.path.rename(path)
    except ConfigError:  # a launcher has it open
        return None
    return path
