"""Logs stay below a size while their writers go on, and the launcher reports it once."""

from __future__ import annotations

import asyncio
import io
import logging
from pathlib import Path

import pytest
from rich.console import Console

from bapo.config.tree import Config
from bapo.runtime.logs import StopFilter, bound_log, rotated_path
from bapo.runtime.process import Interrupts
from bapo.runtime.run_directory.layout import RunDirectory
from services.launcher import session
from services.launcher.display.console import LineDisplay
from services.launcher.supervision.supervisor import last_words


def test_a_log_is_rotated_below_a_writer_that_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    with log.open("ab", buffering=0) as writer:
        for turn in range(5):
            writer.write(b"%d" % turn * 100)
            bound_log(log, 60)
            writer.write(b"end\n")
    assert log.read_bytes() == b"end\n"
    assert rotated_path(log).read_bytes() == b"4" * 60
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 200


def test_a_log_is_cut_although_its_copy_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "learner.log"
    log.write_bytes(b"x" * 61)

    def refuse(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    bound_log(log, 60)
    assert log.stat().st_size == 0


def test_the_launcher_bounds_every_log_of_a_run_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "bound_log", lambda path: bound_log(path, 60))
    output, run = io.StringIO(), RunDirectory.create(tmp_path / "run")
    config = Config.model_validate({"buffer": {"port": 0}, "rollout": {"port": 0}})  # no service to ask
    with session.Session(config, run, LineDisplay(Console(file=output, width=400)), Interrupts()) as started:
        for _ in range(3):
            with run.log_path("worker-0").open("ab") as log:
                log.write(b"ValueError: the verifier said why\n" * 2)
            started.watch(lambda: True)
    assert output.getvalue().count("worker-0.log exceeds 32 MiB and is rotated") == 1
    assert run.log_path("worker-0").stat().st_size == 0
    assert last_words(run.log_path("worker-0")) == "ValueError: the verifier said why"


def test_requests_that_a_stop_cancels_are_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server = logging.getLogger("uvicorn.error")
    server.addFilter(found := StopFilter())
    try:
        server.error("Cancel %s running task(s), timeout graceful shutdown exceeded", 3)
        for error in (asyncio.CancelledError("the server stops"), ValueError("a bug")):
            server.error("Exception in ASGI application", exc_info=error)
    finally:
        server.removeFilter(found)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "Cancel 3 running task(s), timeout graceful shutdown exceeded"),
        ("ERROR", "Exception in ASGI application"),
    ]
