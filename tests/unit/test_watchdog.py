"""A run that stands still says so once, names who waits for whom, and ends if it is told to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bapo.config.tree import SupervisionConfig
from bapo.core.errors import DeadlineError
from bapo.transport.messages import WorkerLeases
from services.launcher.session import progress_mark as mark_of_run
from services.launcher.session import stall_reason
from services.launcher.supervision.children import ProcessLine
from services.stalls import Watchdog, mark_of
from tests.support.clock import Clock
from tests.support.run_rows import make_row
from tests.unit.test_launcher_display import make_snapshot
from tests.unit.test_scheduler import STATUS


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_watchdog(clock: Clock, **settings: object) -> Watchdog:
    return Watchdog(SupervisionConfig.model_validate({"stall_s": 30.0, **settings}), now=clock)


def test_a_standstill_is_told_once_and_so_is_its_end(clock: Clock) -> None:
    watchdog = make_watchdog(clock)
    said = []
    for now, mark in [
        (1000, 1),
        (1029, 1),
        (1031, 1),
        (1040, 1),
        (1045, 2),
        (1050, 2),
        (1074, 2),
        (1080, 2),
        (1081, 3),
    ]:
        clock.now = float(now)
        said.append(watchdog.poll(mark, lambda: "learner is waiting"))
    assert said == [
        None, None, "no progress for 31 s (supervision.stall_s): learner is waiting", None,
        "the run is making progress again after 45 s", None, None,
        "no progress for 35 s (supervision.stall_s): learner is waiting", "the run is making progress again after 36 s",
    ]  # fmt: skip


def test_a_standstill_may_end_the_run(clock: Clock) -> None:
    watchdog = make_watchdog(clock, stall_ends_run=True)
    watchdog.poll(1, str)
    clock.now += 30.0
    with pytest.raises(DeadlineError, match="nobody knows"):
        watchdog.poll(1, lambda: "nobody knows")


def test_steps_measurements_and_processes_that_come_up_are_moves_of_a_run() -> None:
    still = make_snapshot(processes=(ProcessLine(name="learner", state="starting", seconds=1.0),))
    assert mark_of_run(still) == mark_of_run(make_snapshot(processes=still.processes, elapsed_s=999.0))
    ready = (ProcessLine(name="learner", state="ready", seconds=1.0),)
    for moved in (
        make_snapshot(processes=ready),
        make_snapshot(processes=still.processes, metrics=[make_row(1)]),
        make_snapshot(processes=still.processes, status=STATUS),
    ):
        assert mark_of_run(moved) != mark_of_run(still)


def test_the_reason_names_the_stopped_the_starting_and_the_silent() -> None:
    starting = (ProcessLine(name="learner", state="starting", seconds=1.0),)
    waiting = replace(STATUS, step=3, assembled_step=2)
    assert stall_reason(make_snapshot(status=waiting), []) == (
        "learner is waiting for batch 3: 0/32 fresh groups, nothing is requested: is the scheduler running?"
    )
    assert stall_reason(make_snapshot(status=waiting, silence="the buffer service does not answer"), ["redis"]) == (
        "redis is stopped (SIGSTOP; resume it with `kill -CONT`); the buffer service does not answer"
    )
    assert stall_reason(make_snapshot(processes=starting), []) == "learner is still starting"
    assert stall_reason(make_snapshot(), []) == "the buffer service has not responded yet"


def test_zero_switches_it_off(clock: Clock) -> None:
    watchdog = make_watchdog(clock, stall_s=0.0, stall_ends_run=True)
    watchdog.poll(1, str)
    clock.now += 1e6
    assert watchdog.poll(1, str) is None


@pytest.mark.parametrize(
    ("field", "value", "moves"),
    [
        ("step", 7, True),
        ("fresh_ready", 7, True),
        ("evaluations", {"cd34@1": 5}, True),
        ("reevaluation_rounds", {4: 2}, True),
        ("leased", {"fresh": 7}, False),  # a lease that ends and is taken again gets nothing done
        ("failures_in_a_row", 7, False),
        ("workers", {"w": WorkerLeases(leased=0, silent_s=1.0)}, False),
    ],
)
def test_what_counts_as_a_move(field: str, value: object, moves: bool) -> None:
    assert (mark_of(replace(STATUS, **{field: value})) != mark_of(STATUS)) is moves
