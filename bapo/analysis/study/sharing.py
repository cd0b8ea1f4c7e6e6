"""Runs that another study has made already: the same method, seed and settings, finished.

    [study] share = ["outputs/first"]      outputs/second/runs/grpo-s1 -> ../../first/runs/grpo-s1

A link, because a run's records are its evidence and should exist once. Whoever moves one of the studies moves both.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bapo.analysis.study.plan import PlannedRun, Study
from bapo.analysis.study.results import Results
from bapo.analysis.study.state import FINISHED, MOVED, Found, State, look
from bapo.config.load import diff, load_resolved
from bapo.runtime.run_directory.files import append_line, keep_lines, storing
from bapo.runtime.run_directory.layout import RunDirectory


def look_at(study: Study) -> list[Found]:
    """What there is of each run, here or in a study that it shares runs with. Raises: ConfigError."""
    return [_shared(study, look(run)) for run in study.runs]


def take_shared(study: Study, say: Callable[[str], None]) -> None:
    """Link every run that is not begun here and finished elsewhere. Raises: StorageError, ConfigError."""
    for run in study.runs:
        if run.path.is_symlink() and not run.path.exists():
            run.path.unlink()  # the study that had it is gone
        found = None if os.path.lexists(run.path) else twin(study, run)
        if found is None:
            continue
        with storing(run.path):
            run.path.symlink_to(os.path.relpath(found, run.path.parent), target_is_directory=True)
        _remember(study, run, found)
        say(f"{run.name}: shared, finished in {found.parent.parent}")


def twin(study: Study, run: PlannedRun) -> Path | None:
    """The finished run of the same name and settings in a study that this one shares runs with. Raises: ConfigError."""
    for folder in study.file.study.share:
        path = Path(folder) / "runs" / run.name
        if (path / "config.toml").is_file() and RunDirectory(path).read_run().get("status") == FINISHED:
            changes = diff(load_resolved(path / "config.toml"), run.config)
            if all(line.split(":", 1)[0] in MOVED for line in changes):
                return path
    return None


def _shared(study: Study, found: Found) -> Found:
    is_there = found.state is State.NEW and not found.run.path.exists() and twin(study, found.run)
    return replace(found, state=State.FINISHED) if is_there else found


def _remember(study: Study, run: PlannedRun, found: Path) -> None:
    """Its line of results.jsonl, as the other study wrote it."""
    results = Results(study.path)
    for row in Results(found.parent.parent).read():
        if row["run"] == run.name:
            keep_lines(results.path, lambda line: line["run"] != run.name)
            append_line(results.path, row)
