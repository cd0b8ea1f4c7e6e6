"""What a run leaves behind is looked at: errors in logs, deaths that nobody inflicted, records."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo.records import RunDirectory
from tests.chaos.aftermath import (
    complaints,
    deaths_of_their_own,
    errors_in,
    records_of_other_groups,
    records_with_gaps,
    workers_that_died,
)
from tests.chaos.faults import ACTOR, DISK, FLEET, GUARD, LEARNER, NODE, REDIS, SCHEDULER, SECOND_RANK, Fault
from tests.chaos.ledger import fate_line
from tests.factories import make_fate

LOG = """\
2026-11-23 07:04:22,273 WARNING learner.update: step 2 batch is empty: no update
Exception in thread token-records:
Traceback (most recent call last):
  File "/somewhere/token_rows.py", line 79, in groups
    for entry, start in zip(batch.entries, _starts(batch), strict=True):
ValueError: zip() argument 2 is longer than argument 1
2026-11-23 07:04:23,000 ERROR bapo.process: StorageError: cannot write RUN/ports/learner: No space left on device
"""


def kill(*victims: str) -> list[Fault]:
    return [Fault(number=number, what="kill", whom=whom) for number, whom in enumerate(victims)]


def test_errors_are_lines_of_that_level_and_the_ends_of_tracebacks() -> None:
    assert list(errors_in(LOG.splitlines())) == [
        "ValueError: zip() argument 2 is longer than argument 1",
        "ERROR bapo.process: StorageError: cannot write RUN/ports/learner: No space left on device",
    ]
    assert list(errors_in(LOG.splitlines()[:4])) == ["a traceback without an end"]


def test_a_rank_may_say_that_its_team_has_lost_a_member_which_was_killed(tmp_path: Path) -> None:
    log = tmp_path / "learner-1.log"
    lines = [
        "2026-11-23 10:22:59,001 ERROR bapo.process: RankLostError: rank 1 has lost another rank of the learner",
        "[rank1]: Traceback (most recent call last):",
    ]
    log.write_text("".join(f"{line}\n" for line in lines))
    assert complaints([log], kill(LEARNER)) == complaints([log], kill(SECOND_RANK)) == []
    assert len(complaints([log], kill(REDIS))) == 2


def test_a_full_disk_excuses_who_says_so_and_nothing_else(tmp_path: Path) -> None:
    log = tmp_path / "learner.log"
    log.write_text(LOG)
    traceback = "learner.log: ValueError: zip() argument 2 is longer than argument 1 (1 times)"
    assert complaints([log], [Fault(number=0, what="fill", whom=DISK)]) == [traceback]
    assert len(complaints([log], kill(REDIS))) == 2


def test_a_sentence_that_the_full_disk_has_cut_is_known_by_the_name_of_its_error(tmp_path: Path) -> None:
    log = tmp_path / "rollout_server.log"
    log.write_text("2026-11-23 07:04:22,273 ERROR rollout_server.worker: worker-0 failed: StorageError: Redis at un")
    assert complaints([log], [Fault(number=0, what="fill", whom=DISK)]) == []
    assert len(complaints([log], kill(REDIS))) == 1


@pytest.mark.parametrize(
    ("faults", "found"),
    [
        (kill(LEARNER, SCHEDULER), []),
        (kill(SECOND_RANK, SCHEDULER, REDIS), []),  # its team goes with it
        (kill(LEARNER), ["scheduler died 1 times, 1 of them by an exit code, and was killed 0 times"]),
        (kill(SCHEDULER), ["learner died 1 times, 0 of them by an exit code, and was killed 0 times"]),
    ],
)
def test_who_dies_more_often_than_it_is_killed_is_named(faults: list[Fault], found: list[str]) -> None:
    words = "\n".join(
        [
            "learner ended with signal SIGKILL; it starts again in 0.1 s (restart 1, at most 5 within 600 s)",
            "step 3/100 reward=0.422",
            "scheduler ended with exit code 1; it starts again in 0.5 s (restart 1, at most 5 within 600 s)",
        ]
    )
    assert deaths_of_their_own(words, faults) == found


@pytest.mark.parametrize("whom", [GUARD, NODE, FLEET])
def test_a_rollout_server_also_dies_by_its_guard_and_its_node(whom: str) -> None:
    assert deaths_of_their_own("rollout_server ended with exit code 1; it starts again in 0.1 s", kill(whom)) == []


def test_a_worker_may_die_when_it_or_its_node_is_killed() -> None:
    log = "2026-11-23 07:04:22,273 WARNING rollout_server.place: worker-0 died: UnavailableError: why\n"
    assert workers_that_died(log, kill(ACTOR)) == []
    assert workers_that_died(log, kill(REDIS)) == [
        "1 workers died and 0 were killed: ['worker-0 died: UnavailableError: why']"
    ]


def test_a_worker_that_was_killed_and_again_while_it_started_died_twice() -> None:
    log = "".join(f"12:16:31 WARNING rollout_server.place: {who} died: why\n" for who in ("worker-0", "worker-0.1"))
    assert workers_that_died(log, [Fault(number=0, what="kill", whom=ACTOR, seconds=2.6)]) == []
    assert len(workers_that_died(log, kill(ACTOR))) == 1


def test_a_worker_may_end_with_the_disk_of_the_buffer_when_that_was_filled() -> None:
    log = "2026-11-23 10:42:42,141 WARNING rollout_server.place: worker-0 died: StorageError: Redis cannot write\n"
    assert workers_that_died(log, [Fault(number=0, what="fill", whom=DISK)]) == []
    assert len(workers_that_died(log, kill(REDIS))) == 1


def test_records_must_reach_the_last_commit_once_each_and_lack_no_prompt(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    for step in (1, 2):
        run.append_metrics({"step": step})
        run.write_groups(step, [])
    row = {"split": "cd", "version": 1, "num_dropped": 0}
    run.append_evaluation(row)
    assert records_with_gaps(run, 2) == []
    run.append_evaluation(row)
    run.append_evaluation({**row, "version": 3, "num_dropped": 2})
    assert records_with_gaps(run, 3) == [
        "metrics.jsonl ends at step 2, step 3 was committed",
        "evaluation ('cd', 1) has 2 rows",
        "evaluation cd of version 3 lacks 2 prompts",
    ]


def test_group_records_are_those_of_the_batch_that_the_learner_got(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    fates = [make_fate(group_id="a"), make_fate(group_id="b")]
    run.write_groups(1, fates)
    lines = [fate_line(fate) for fate in fates]
    assert records_of_other_groups(run, {1: {"fates": lines}}) == []
    assert records_of_other_groups(run, {1: {"fates": lines[::-1]}}) == ["groups/ of step 1 are not those of its batch"]
