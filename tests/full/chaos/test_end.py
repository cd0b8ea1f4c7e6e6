"""A run whose parts are killed, also behind its last step, comes to its end with all of its records."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bapo.tasks.registry import load_task
from tests.full.chaos.aftermath import complaints, deaths_of_their_own, records_of_other_groups, records_with_gaps
from tests.full.chaos.faults import EVALUATOR, LEARNER, REDIS, ROLLOUT_SERVER, SCHEDULER, SERVICE, Fault, inflict
from tests.full.chaos.invariants import violations
from tests.full.chaos.stage import Stage
from tests.full.chaos.trial import EAGER, START_S, Trial, Watch

pytestmark = [pytest.mark.long]

NUM_STEPS = 8
END_S = 240.0
GAP_S = 2.0
BEFORE = (LEARNER, SCHEDULER, SERVICE)
BEHIND = (EVALUATOR, REDIS, ROLLOUT_SERVER, SERVICE)
"""Who is killed when all steps are done and the last weights are measured."""


class Killer:
    """Kills who is there."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.faults: list[Fault] = []

    def wait(self, condition: Callable[[], bool], timeout_s: float = END_S) -> None:
        """Raises: AssertionError when it is not true in time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self._stage.last_words
            time.sleep(0.05)

    def kill(self, whom: str) -> None:
        """As soon as it is there, while the run goes on."""
        self.wait(lambda: self._stage.has(whom) or self._stage.exit_code is not None)
        self.faults.append(Fault(number=len(self.faults), what="kill", whom=whom))
        assert inflict(self.faults[-1], self._stage), f"the run ended before {whom} was killed"


def test_a_run_whose_parts_are_killed_also_behind_its_last_step_comes_to_its_end(tmp_path: Path) -> None:
    overrides = EAGER | {
        "run.num_steps": NUM_STEPS,
        "evaluation.every": 4,
        "evaluation.num_prompts_final": 16,
        "rollout.max_groups_in_flight": 2,  # so that the last measurement takes as long as the kills
        "rollout.engine_options.latency_s": 0.8,
    }
    stage = Stage(tmp_path, overrides)
    killer = Killer(stage)
    try:
        stage.start()
        Watch(stage, Trial(seed=0, overrides=overrides)).wait_for_commits(2, START_S)
        for whom in BEFORE:
            killer.kill(whom)
            time.sleep(GAP_S)
        killer.wait(lambda: len(stage.run.read_metrics()) == NUM_STEPS and not stage.has(LEARNER))
        for whom in BEHIND:
            killer.kill(whom)
            time.sleep(GAP_S)
        killer.wait(lambda: stage.exit_code is not None)
        assert stage.exit_code == 0, stage.last_words
        run, evidence = stage.run, stage.evidence()
        assert run.read_run()["status"] == "finished"
        assert violations(evidence) == []
        assert records_with_gaps(run, NUM_STEPS) == records_of_other_groups(run, evidence.batches) == []
        splits = load_task(stage.config.task.name, stage.config.task.options).held_out_splits
        measured = {(row["split"], row["version"]) for row in run.read_evaluations()}
        assert measured >= {(split, version) for split in splits for version in (1, NUM_STEPS + 1)}
        assert complaints(stage.logs(), killer.faults) == deaths_of_their_own(stage.words, killer.faults) == []
    finally:
        stage.close()
