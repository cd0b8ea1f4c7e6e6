"""The rollout server's own thread: what ends it before its time ends the process, and is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo.config.tree import Config
from bapo.metrics.metric import Process
from bapo.records import RunDirectory
from bapo.telemetry import Telemetry
from rollout_server.__main__ import Runner


def test_a_fleet_whose_thread_fails_ends_the_server_and_names_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Runner) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(Runner, "_run_fleet", fail)
    config = Config.model_validate({"rollout": {"engine": "scripted"}})
    telemetry = Telemetry(Process.ROLLOUT_SERVER, run="test")
    ends: list[str] = []
    runner = Runner(config, RunDirectory(tmp_path), "http://127.0.0.1:1", telemetry)
    runner.start(on_end=lambda: ends.append("ended"))
    runner.stop()
    assert ends == ["ended"]
    assert runner.fleet.fatal is not None
    assert "KeyError('lost')" in str(runner.fleet.fatal)
    assert runner.fleet.fatal.exit_code == 1
