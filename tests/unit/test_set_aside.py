"""The name of a run that trained nothing is free again; anything else is never moved."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import pytest

from bapo.cli.training.start import create_run
from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.files import locked
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.set_aside import can_be_replaced, set_aside
from services.launcher.doctor.dry_run import free_name
from tests.support.launcher_config import make_config
from tests.support.run_rows import make_row

DEAD_PID = 2**22 + 1
"""Larger than any process id of Linux."""
HERE = platform.node()


def _run(tmp_path: Path, **fields: Any) -> RunDirectory:
    run = RunDirectory.create(tmp_path / "mine", "")
    run.update_run(**({"status": "failed", "pid": DEAD_PID, "host": HERE} | fields))
    return run


@pytest.mark.parametrize("status", ["failed", "interrupted", "starting", "running"])
def test_a_run_that_ended_before_its_first_step_is_kept_under_another_name(tmp_path: Path, status: str) -> None:
    run = _run(tmp_path, status=status)
    run.log_path("learner").write_text("why it failed")
    config = make_config(tmp_path, run={"root": str(tmp_path), "name": "mine"})
    assert free_name(config).status == "ok"
    assert create_run(config).read_run() == {}
    assert (tmp_path / "mine.failed-1" / "logs" / "learner.log").read_text() == "why it failed"


def test_two_failed_starts_are_both_kept(tmp_path: Path) -> None:
    for number in (1, 2):
        assert set_aside(_run(tmp_path)) == tmp_path / f"mine.failed-{number}"


def test_a_run_that_trained_a_step_is_never_moved(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.append_metrics(make_row(1))
    config = make_config(tmp_path, run={"root": str(tmp_path), "name": "mine"})
    assert free_name(config).status == "fail"
    with pytest.raises(ConfigError):
        create_run(config)
    assert len(run.read_metrics()) == 1


@pytest.mark.parametrize("name", ["step-000002", "step-000002.partial"])
def test_nor_is_one_with_a_checkpoint_or_a_part_of_one(tmp_path: Path, name: str) -> None:
    run = _run(tmp_path)
    (run.path / "checkpoints" / name).mkdir(parents=True)
    assert not can_be_replaced(run)


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "running", "pid": os.getpid()},
        {"status": "running", "host": "another"},
        {"status": "finished"},
        {"status": None},  # created for processes that are started separately
    ],
)
def test_nor_one_that_may_be_in_progress_or_was_not_started_here(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert set_aside(_run(tmp_path, **fields)) is None


def test_nor_one_with_damaged_records(tmp_path: Path) -> None:
    run = _run(tmp_path)
    (run.path / "metrics.jsonl").write_text("not JSON\n{}\n")
    assert not can_be_replaced(run)


def test_nor_one_whose_launcher_is_still_ending(tmp_path: Path) -> None:
    run = _run(tmp_path)
    with locked(run.path / ".lock", "busy"):
        assert set_aside(run) is None
