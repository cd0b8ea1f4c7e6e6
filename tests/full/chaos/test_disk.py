"""A disk that is full ends the run with the reason, and with free space the same run goes on as if nothing was."""

from __future__ import annotations

import time
from pathlib import Path

from tests.full.chaos.invariants import violations
from tests.full.chaos.stage import Stage
from tests.full.chaos.trial import EAGER, START_S, Trial, Watch
from tests.support.small_disk import fill

END_S = 60.0


def test_a_run_survives_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    overrides = EAGER | {"run.root": small_disk}
    stage = Stage(tmp_path / "stage", overrides)
    try:
        stage.start()
        Watch(stage, Trial(seed=0, overrides=overrides)).wait_for_commits(3, START_S)
        filler = small_disk / "filler"
        fill(filler)
        deadline = time.monotonic() + END_S
        while stage.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert stage.exit_code == 3, stage.last_words
        assert "No space left on device" in stage.last_words or "cannot write to its disk" in stage.last_words
        assert f"bapo train --resume {stage.run.path}" in stage.last_words

        filler.unlink()
        stage.start(resume=True)
        assert stage.ready_parts == set(), "those of the launcher that has ended do not count"
        Watch(stage, Trial(seed=0, overrides=overrides)).wait_for_commits(6, START_S)
        assert {"buffer_service", "learner"} <= stage.ready_parts
        assert stage.end() == 130, stage.last_words
        assert violations(stage.evidence()) == []
    finally:
        stage.close()
