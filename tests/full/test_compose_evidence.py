"""The check of docker-compose.yml tells a run that is whole from one that has lost or repeated something."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from bapo.config.load import dump_toml, load_config
from bapo.metrics.metric import Process
from bapo.records import RunDirectory
from bapo.types import Origin
from tests.compose.chapters import total
from tests.compose.evidence import complaints, last_step
from tests.compose.monitoring import healthy_rules, queries, up
from tests.factories import make_fate

CONFIG = load_config([str(Path(__file__).parents[1] / "compose" / "configs" / "vllm.toml")], [])
B, EVERY = CONFIG.algorithm.batch_size, CONFIG.checkpoint.every


def record(folder: Path, steps: Iterable[int], *, checkpoint: int, batch_size: int = B, again: str = "") -> Path:
    """A run with these steps. `again`: a group that every step looks at."""
    run = RunDirectory.create(folder / "run", dump_toml(CONFIG))
    for step in steps:
        names = [f"{step}-{i}" for i in range(batch_size - bool(again))] + [again] * bool(again)
        run.write_groups(step, [make_fate(group_id=name, origin=Origin.X1) for name in names])
        run.append_metrics({"step": step})
    run.checkpoint_dir(checkpoint).mkdir()
    (run.checkpoint_dir(checkpoint) / "state.json").write_text(json.dumps({}))
    return run.path


def test_a_run_that_ended_by_itself_has_a_checkpoint_of_its_last_step(tmp_path: Path) -> None:
    assert (B, EVERY) == (16, 3)
    assert complaints(record(tmp_path / "whole", range(1, 8), checkpoint=7), num_steps=7) == []
    (found,) = complaints(record(tmp_path / "cut", range(1, 8), checkpoint=6), num_steps=7)
    assert found == "the newest checkpoint is of step 6, not 7"


@pytest.mark.parametrize(("checkpoint", "is_sound"), [(6, True), (3, True), (0, False), (9, False)])
def test_a_run_that_was_stopped_is_at_most_one_checkpoint_behind(
    tmp_path: Path, checkpoint: int, is_sound: bool
) -> None:
    run = record(tmp_path, range(1, 9), checkpoint=checkpoint)
    assert last_step(run) == 8
    assert (complaints(run, num_steps=8, is_whole=False) == []) is is_sound


def test_what_is_missing_or_there_twice_is_named(tmp_path: Path) -> None:
    (found,) = complaints(record(tmp_path / "lost", [1, 2, 4], checkpoint=3), num_steps=4, is_whole=False)
    assert found == "metrics.jsonl has the steps [1, 2, 4], not 1 to 4 once each"
    short = complaints(record(tmp_path / "short", [1, 2, 3], checkpoint=3, batch_size=15), num_steps=3)
    assert short == [f"step {step} looked at 15 fresh groups, not B = 16" for step in (1, 2, 3)]
    (found,) = complaints(record(tmp_path / "again", [1, 2, 3], checkpoint=3, again="g"), num_steps=3)
    assert found == "g was fresh in 3 steps"


def test_groups_that_were_too_old_are_none_of_the_batch(tmp_path: Path) -> None:
    run = RunDirectory(record(tmp_path, [1, 2, 3], checkpoint=3))
    fates = [make_fate(group_id=f"new-{i}") for i in range(B)]
    run.write_groups(3, [*fates, make_fate(group_id="old", origin=None, reason="stale")])
    assert complaints(run.path, num_steps=3) == []


def test_a_target_that_is_down_or_a_rule_that_failed_does_not_count() -> None:
    def target(process: Process, health: str) -> dict[str, object]:
        return {"labels": {"process": process.value}, "health": health}

    both = [target(Process.LEARNER, "up"), target(Process.ROLLOUT_SERVER, "up"), target(Process.ROLLOUT_SERVER, "up")]
    assert up({"activeTargets": both}) == {"learner": 1, "rollout_server": 2}
    assert up({"activeTargets": [*both, target(Process.SCHEDULER, "down")]}) == {}
    groups = [{"rules": [{"name": "A", "health": "ok"}, {"name": "B", "health": "unknown"}]}]
    assert healthy_rules({"groups": groups}) == {"A"}


def test_a_number_that_a_process_does_not_know_yet_counts_as_none() -> None:
    page = '# TYPE bapo_learner_step gauge\nbapo_learner_step{run="a"} %s\n'
    assert total(page % "NaN", "bapo_learner_step") == 0
    assert total(page % "7", "bapo_learner_step") == 7
    assert total(page % "7", "bapo_learner_steps") == 0


def test_no_query_of_a_panel_keeps_a_variable() -> None:
    found = [query for _, query in queries()]
    assert len(found) > 100
    assert [query for query in found if "$" in query] == []
