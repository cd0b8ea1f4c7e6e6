"""A run whose parts are killed all along, also behind its last step, comes to its end with all of its records."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from bapo.tasks.registry import load_task
from tests.chaos.aftermath import complaints, deaths_of_their_own, records_of_other_groups, records_with_gaps
from tests.chaos.faults import EVALUATOR, FLEET, LEARNER, REDIS, SCHEDULER, SERVICE, Fault, inflict
from tests.chaos.invariants import violations
from tests.chaos.stage import Stage
from tests.chaos.trial import EAGER, START_S, Trial, Watch

pytestmark = [pytest.mark.slow, pytest.mark.long]

NUM_STEPS = 12
END_S = 240.0
GAP_S = 1.0
VICTIMS = (LEARNER, SERVICE, EVALUATOR, REDIS, SCHEDULER, REDIS, FLEET)


def test_a_run_whose_parts_are_killed_all_along_comes_to_its_end(tmp_path: Path) -> None:
    overrides = EAGER | {"run.num_steps": NUM_STEPS, "evaluation.every": 4, "evaluation.num_prompts_final": 16}
    stage = Stage(tmp_path, overrides)
    faults: list[Fault] = []
    try:
        stage.start()
        Watch(stage, Trial(seed=0, overrides=overrides)).wait_for_commits(1, START_S)
        deadline = time.monotonic() + END_S
        for number, whom in enumerate(itertools.cycle(VICTIMS)):
            until = time.monotonic() + GAP_S
            while stage.exit_code is None and time.monotonic() < until:
                time.sleep(0.1)
            if stage.exit_code is not None or time.monotonic() > deadline:
                break
            if stage.has(whom):
                faults.append(Fault(number=number, what="kill", whom=whom))
                inflict(faults[-1], stage)
        assert stage.exit_code == 0, stage.last_words
        run, evidence = stage.run, stage.evidence()
        assert run.read_run()["status"] == "finished"
        assert violations(evidence) == []
        assert records_with_gaps(run, NUM_STEPS) == records_of_other_groups(run, evidence.batches) == []
        assert [row["step"] for row in run.read_metrics()] == list(range(1, NUM_STEPS + 1))
        splits = load_task(stage.config.task.name, stage.config.task.options).held_out_splits
        measured = {(row["split"], row["version"]) for row in run.read_evaluations()}
        assert measured >= {(split, version) for split in splits for version in (1, NUM_STEPS + 1)}
        assert complaints(stage.logs(), faults) == deaths_of_their_own(stage.words, faults) == []
    finally:
        stage.close()
