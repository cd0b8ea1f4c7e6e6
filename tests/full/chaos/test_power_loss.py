"""The end of the append-only file is lost, as by a power failure: the run goes on from its newest checkpoint.

What was acknowledged in the lost part is gone: that is what `everysec` means. All else must hold: the learner trains
behind its checkpoint on batches that Algorithm 1 makes of what is left, and no group is consumed twice.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.full.chaos.evidence import Evidence
from tests.full.chaos.invariants import violations
from tests.full.chaos.ledger import Line
from tests.full.chaos.stage import Stage
from tests.full.chaos.trial import EAGER, START_S, Trial, Watch

pytestmark = [pytest.mark.long]

SEED = 11
LONG_CUT = 400_000


def cut_append_only_file(stage: Stage, num_bytes: int) -> int:
    """Drop the last bytes of what Redis has written; returns how many there were."""
    (path,) = (stage.run.redis_path / "appendonlydir").glob("*.incr.aof")
    size = path.stat().st_size
    with path.open("rb+") as file:
        file.truncate(max(0, size - num_bytes))
    return size


@pytest.mark.parametrize("num_bytes", [random.Random(SEED).randrange(1_000, 30_000), LONG_CUT])
def test_a_run_whose_redis_has_lost_its_last_writes_resumes(tmp_path: Path, num_bytes: int) -> None:
    """The short cut loses some groups; the long one also batches that the newest checkpoint stands on."""
    # With as many attempts as a run has: none is lost to workers that still have the weights of the lost future.
    overrides = EAGER | {"evaluation.every": 0, "buffer.max_attempts": 3}
    stage = Stage(tmp_path, overrides)
    try:
        stage.start()
        Watch(stage, Trial(seed=SEED, overrides=overrides)).wait_for_commits(14, START_S)
        stage.kill()
        size = cut_append_only_file(stage, num_bytes)
        assert size > num_bytes, f"the run had written {size} bytes only"
        stage.start(resume=True)
        Watch(stage, Trial(seed=SEED, overrides=overrides)).wait_for_commits(8, START_S)
        assert stage.end() == 130, stage.last_words
        evidence = stage.evidence()
        if num_bytes == LONG_CUT:
            assert evidence.of("restore"), "the batches behind the checkpoint were lost, so its snapshot was needed"
        assert violations(without_the_lost_future(evidence)) == []
    finally:
        stage.close()


def without_the_lost_future(found: Evidence) -> Evidence:
    """The run as its checkpoint knows it: steps behind it were trained twice, and only the second time counts."""
    (resume,) = found.of("resume")[-1:]

    def counts(line: Line) -> bool:
        if line["at"] > resume["at"]:
            return True
        if line["event"] in ("batch", "commit"):
            return bool(line["step"] <= resume["step"])
        return bool(line["event"] not in ("asked", "acknowledged"))  # these promises are what was lost

    return replace(found, lines=[line for line in found.lines if counts(line)])
