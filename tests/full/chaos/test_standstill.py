"""A run that stands still for longer than `supervision.stall_s` says who waits for whom, and ends if it is told to."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.full.chaos.stage import Stage
from tests.full.chaos.trial import EAGER, START_S, Trial, Watch

STALL_S = 20
"""Longer than the start of a learner on a busy machine."""
STALL = {"supervision.stall_s": STALL_S, "evaluation.every": 0}


def test_a_stopped_learner_is_named_and_the_run_ends_with_5(tmp_path: Path) -> None:
    overrides = EAGER | STALL | {"supervision.stall_ends_run": "true"}
    stage = Stage(tmp_path, overrides)
    try:
        stage.start()
        Watch(stage, Trial(seed=0, overrides=overrides)).wait_for_commits(2, START_S)
        stage.process("learner").suspend()
        deadline = time.monotonic() + STALL_S + 20.0
        while stage.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert stage.exit_code == 5, stage.last_words
        assert f"no progress for {STALL_S} s (supervision.stall_s)" in stage.last_words
        assert stage.run.read_run()["status"] == "failed"
    finally:
        stage.close()


@pytest.mark.long
def test_stopped_workers_are_told_once_and_so_is_that_they_go_on(tmp_path: Path) -> None:
    overrides = EAGER | STALL
    stage = Stage(tmp_path, overrides)
    try:
        stage.start()
        watch = Watch(stage, Trial(seed=0, overrides=overrides))
        watch.wait_for_commits(2, START_S)
        fleet = stage.process("rollout_server")
        fleet.suspend()
        time.sleep(STALL_S + 4.0)
        fleet.resume()
        watch.wait_for_commits(2, 60.0)
        watch.wait(2.0)  # the launcher looks at the buffer once a second
        assert stage.end() == 130, stage.last_words
        output = (tmp_path / "launcher.log").read_text()
        assert output.count("no progress for") == 1
        assert "rollout_server is stopped (SIGSTOP; resume it with `kill -CONT`)" in output
        assert output.count("the run is making progress again after") == 1
    finally:
        stage.close()
