"""A run keeps its promises under ten faults of a recorded seed; the long trial is `python -m tests.full.chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.full.chaos.faults import (
    ACTOR,
    DISK,
    EVALUATOR,
    GRADER,
    LEARNER,
    NODE,
    REDIS,
    ROLLOUT_SERVER,
    SCHEDULER,
    SERVICE,
    Fault,
    plan,
)
from tests.full.chaos.sabotage import (
    change_a_batch_that_is_asked_for_again,
    drop_an_acknowledged_group,
    lose_hard_prompts,
)
from tests.full.chaos.trial import EAGER, PAPER, RAY, run_trial

SEED = 20261121


def test_ten_faults_lose_nothing_repeat_nothing_and_stop_nothing(tmp_path: Path) -> None:
    faults = plan(10, SEED)
    trial = run_trial(tmp_path, faults, seed=SEED, overrides=EAGER, num_steps=4)
    assert trial.violations == []
    assert trial.faults == faults
    found = trial.evidence
    assert found is not None
    # So that the checks had something to look at: a fault that killed the whole run would leave no violation either.
    assert len(found.acknowledged) > 50
    assert len(found.batches) > 3
    assert len(found.of("resume")) >= sum(fault.kind == "kill learner" for fault in faults)


def test_in_the_papers_order_every_batch_stays_that_of_the_plain_loop(tmp_path: Path) -> None:
    victims = (SERVICE, REDIS, ROLLOUT_SERVER)
    faults = [Fault(number=number, what="kill", whom=whom, gap_s=0.3) for number, whom in enumerate(victims)]
    trial = run_trial(tmp_path, faults, seed=SEED, overrides=PAPER)
    assert trial.violations == []


@pytest.mark.long
def test_rays_node_its_worker_and_a_full_disk_take_nothing_along(tmp_path: Path, small_disk: Path) -> None:
    kills = [Fault(number=number, what="kill", whom=whom, gap_s=0.5) for number, whom in enumerate((ACTOR, NODE))]
    full = Fault(number=2, what="fill", whom=DISK, seconds=3.0)
    trial = run_trial(tmp_path, [*kills, full], seed=SEED, overrides=EAGER | RAY, num_steps=6, disk=small_disk)
    assert trial.violations == []
    assert trial.evidence is not None
    assert {line["who"] for line in trial.evidence.of("sent")} == {"worker"}


@pytest.mark.long
def test_with_one_restart_allowed_each_part_may_be_killed_once(tmp_path: Path) -> None:
    """As a user runs it: who dies of another one's death ends this run."""
    as_shipped = {"supervision.max_restarts": 1, "supervision.window_s": 600, "supervision.restart_backoff_s": 0.5}
    victims = (SERVICE, SCHEDULER, REDIS, EVALUATOR, ROLLOUT_SERVER, GRADER, LEARNER)
    faults = [Fault(number=number, what="kill", whom=whom, gap_s=1.0) for number, whom in enumerate(victims)]
    trial = run_trial(tmp_path, faults, seed=SEED, overrides=EAGER | as_shipped, num_steps=4)
    assert trial.violations == []
    assert trial.missed == []


@pytest.mark.long
def test_a_killed_rank_takes_its_team_back_to_the_checkpoint(tmp_path: Path) -> None:
    killed = Fault(number=0, what="kill", whom=f"{LEARNER}-1", gap_s=0.5)
    trial = run_trial(tmp_path, [killed], seed=SEED, overrides=EAGER | {"learner.num_ranks": 2}, num_steps=4)
    assert trial.violations == []
    assert trial.evidence is not None
    assert len(trial.evidence.of("resume")) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("sabotage", "faults", "found_by"),
    [
        (drop_an_acknowledged_group, [], "no_acknowledged_group_is_lost"),
        (change_a_batch_that_is_asked_for_again, ["learner"], "a_batch_never_changes"),
        (lose_hard_prompts, [], "tables_equal_algorithm_1"),
    ],
)
def test_a_buffer_that_is_broken_on_purpose_is_found_out(
    tmp_path: Path, sabotage: object, faults: list[str], found_by: str
) -> None:
    kills = [Fault(number=number, what="kill", whom=whom) for number, whom in enumerate(faults)]
    name = sabotage.__name__  # type: ignore[attr-defined]
    # No checkpoint releases a batch, so that the learner must ask for all of them again.
    overrides = EAGER | {"checkpoint.every": 1000}
    trial = run_trial(tmp_path, kills, seed=SEED, overrides=overrides, num_steps=10, sabotage=name)
    assert found_by in {sentence.partition(":")[0] for sentence in trial.violations}
