"""`bapo.Run` of a run that another process has started: how it has ended."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

import bapo
from bapo.cli.running.runs import state_name
from bapo.config.load import dump_toml, load_config
from bapo.core.errors import BapoError, ConfigError
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.run_rows import make_row

GONE = 2**22 + 1
"""A process id that Linux never gives."""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", dump_toml(load_config([], [])))


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, "created"),
        ({"status": "starting", "pid": os.getpid()}, "starting"),
        ({"status": "running", "pid": os.getpid()}, "running"),
        ({"status": "running", "pid": GONE, "host": "another"}, "running"),
        ({"status": "running", "pid": GONE}, "failed"),
        ({"status": "starting", "pid": GONE}, "failed"),
        ({"status": "failed", "pid": GONE}, "failed"),
        ({"status": "finished", "pid": GONE}, "finished"),
        ({"status": "interrupted", "pid": GONE}, "interrupted"),
    ],
)
def test_a_run_under_way_has_a_launcher(run: RunDirectory, fields: dict[str, object], status: str) -> None:
    if fields:
        run.update_run(**fields)
    assert bapo.Run(run.path).status == status


@pytest.mark.parametrize(("age_s", "status"), [(0.0, "running"), (3600.0, "stopped")])
def test_the_status_of_a_run_in_containers_is_what_its_records_say(
    run: RunDirectory, age_s: float, status: str
) -> None:
    run.append_metrics(make_row(1, time=time.time() - age_s))
    followed = bapo.Run(run.path)
    assert (followed.status, followed.is_running) == (status, status == "running")


@pytest.mark.parametrize("status", ["finished", "interrupted"])
def test_waiting_for_a_run_that_ended_as_asked_gives_its_status(run: RunDirectory, status: str) -> None:
    run.update_run(status=status, pid=GONE, message="stopped by the user")
    assert bapo.Run(run.path).wait() == status


@pytest.mark.parametrize(("code", "kind"), [(1, BapoError), (2, ConfigError), (4, BapoError)])
def test_waiting_for_a_run_that_failed_raises_what_its_launcher_said(
    run: RunDirectory, code: int, kind: type[BapoError]
) -> None:
    run.update_run(status="failed", pid=GONE, exit_code=code, message="error: the disk is full\nResume from step 1")
    with pytest.raises(BapoError) as caught:
        bapo.Run(run.path).wait()
    assert type(caught.value) is kind
    assert str(caught.value) == (
        f"run {run.path} has failed with exit code {code}:\nthe disk is full\nResume from step 1"
    )


def test_the_rows_of_a_run_whose_launcher_was_killed_end_with_an_error(run: RunDirectory) -> None:
    run.append_metrics(make_row(1))
    run.update_run(status="running", pid=GONE)
    rows = iter(bapo.Run(run.path))
    assert next(rows)["step"] == 1
    with pytest.raises(BapoError, match=re.escape(f"its launcher (pid {GONE}) was killed; see bapo status {run.path}")):
        next(rows)


def test_a_run_that_finishes_between_two_reads_has_not_failed(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.update_run(status="running", pid=GONE)
    fields = run.read_run()

    def ends(directory: RunDirectory) -> bool:
        directory.update_run(status="finished")
        return False

    monkeypatch.setattr(RunDirectory, "is_under_way", property(ends))
    assert (bapo.Run(run.path).status, state_name(run, fields)) == ("finished", "finished")
