"""Which deaths are accidents, how often and how fast a process starts again, and what the user is told."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from bapo.config.tree import SupervisionConfig
from bapo.core.errors import RankLostError
from services.launcher.supervision import supervisor
from services.launcher.supervision.child_process import Child, ProcessSpec, Restarts, end, kill_descendants
from services.launcher.supervision.children import all_ended
from services.launcher.supervision.supervisor import ChildFailedError, Supervisor
from tests.full.chaos.aftermath import deaths_of_their_own
from tests.support.clock import Clock
from tests.support.wait import has_ended, wait_until

LONG = "import time; time.sleep(60)"
LOST = f"raise SystemExit({RankLostError.exit_code})"
NOW = SupervisionConfig(restart_backoff_s=0.0)


class Parts:
    """Children of one run and what their supervisor said."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.children, self.said, self.clock = folder, [], [], Clock()  # type: ignore[var-annotated]

    def start(
        self, code: str = LONG, *, name: str = "part", restarts: Restarts = Restarts.CRASHED, **fields: object
    ) -> Child:
        spec = ProcessSpec(
            name=name, argv=(sys.executable, "-c", code), env=dict(os.environ), log_path=self.folder / f"{name}.log",
            is_ready=lambda: True, restarts=restarts, **fields,  # type: ignore[arg-type]
        )  # fmt: skip
        child = Child(spec)
        child.poll()
        self.children.append(child)
        return child

    def supervisor(self, settings: SupervisionConfig = NOW) -> Supervisor:
        return Supervisor(settings, self.said.append, now=self.clock)


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    # What other tests have started below this process, as the Redis of the session, is none of the run's.
    others = [SimpleNamespace(process=process) for process in psutil.Process().children()]
    monkeypatch.setattr(supervisor, "kill_descendants", lambda but: kill_descendants(but=[*but, *others]))
    made = Parts(tmp_path)
    yield made
    end(made.children, grace_s=0.0)


def kill(child: Child) -> None:
    child.process.kill()
    child.process.wait()


def test_a_killed_process_starts_again_and_the_user_reads_one_line(parts: Parts) -> None:
    child = parts.start()
    supervisor = parts.supervisor()
    first = child.process.pid
    assert not supervisor.poll(parts.children)
    kill(child)
    assert supervisor.poll(parts.children)
    assert (child.process.pid != first, child.exit_code, child.num_restarts, child.ready_after_s) == (
        True,
        None,
        1,
        None,
    )
    assert parts.said == [
        "part failed with signal SIGKILL; restarting in 0.0 s "
        f"(restart 1, maximum 5 within 600 s; log: {child.spec.log_path})"
    ]
    assert deaths_of_their_own(parts.said[0], []) == [
        "part died 1 times, 0 of them by an exit code, and was killed 0 times"
    ], "tests of faults read this line"


def test_an_optional_process_that_cannot_start_again_is_left_away(parts: Parts) -> None:
    child, other = parts.start("raise SystemExit(2)", is_optional=True), parts.start(name="other")
    child.process.wait()
    supervisor = parts.supervisor()
    assert not supervisor.poll(parts.children)
    assert not supervisor.poll(parts.children)
    assert (child.has_failed, child.has_ended, other.exit_code) == (False, True, None)
    assert parts.said == [f"part failed with exit code 2; the run continues without it (log: {child.spec.log_path})"]


@pytest.mark.parametrize(
    ("code", "restarts", "is_accident"),
    [
        ("import os; os.kill(os.getpid(), 9)", Restarts.NEVER, False),
        ("import os; os.kill(os.getpid(), 9)", Restarts.KILLED, True),
        ("import os; os.kill(os.getpid(), 9)", Restarts.CRASHED, True),
        ("raise ValueError('a bug')", Restarts.KILLED, False),
        ("raise ValueError('a bug')", Restarts.CRASHED, True),
        ("raise SystemExit(0)", Restarts.CRASHED, True),  # a service does not end
        ("raise SystemExit(2)", Restarts.CRASHED, False),  # a setting is wrong
        ("raise SystemExit(2)", Restarts.USER_CODE, False),
        ("raise SystemExit(9)", Restarts.USER_CODE, True),  # whatever a user's library exits with
        ("raise SystemExit(3)", Restarts.CRASHED, False),  # the disk is full
        ("raise SystemExit(4)", Restarts.KILLED, False),  # the loss is not finite
    ],
)
def test_an_accident_is_told_from_a_verdict(parts: Parts, code: str, restarts: Restarts, is_accident: bool) -> None:
    child = parts.start(code, restarts=restarts)
    child.ready_after_s = 0.1
    child.process.wait()
    if is_accident:
        assert parts.supervisor().poll(parts.children)
    else:
        with pytest.raises(ChildFailedError):
            parts.supervisor().poll(parts.children)


def test_what_never_worked_is_not_tried_again(parts: Parts) -> None:
    child = parts.start()
    child.ready_after_s = None
    kill(child)
    with pytest.raises(ChildFailedError):
        parts.supervisor().poll(parts.children)


def test_pauses_double_and_the_last_death_of_many_ends_the_run(parts: Parts) -> None:
    child = parts.start()
    supervisor = parts.supervisor(SupervisionConfig(max_restarts=3, restart_backoff_s=2.0, window_s=100.0))
    for pause_s in (2.0, 4.0, 8.0):
        kill(child)
        assert not supervisor.poll(parts.children)
        assert not child.has_ended  # it will be back
        parts.clock.now += pause_s - 0.1
        assert not supervisor.poll(parts.children)
        parts.clock.now += 0.2
        assert supervisor.poll(parts.children)
    kill(child)
    with pytest.raises(ChildFailedError):
        supervisor.poll(parts.children)


def test_old_accidents_are_forgiven(parts: Parts) -> None:
    child = parts.start()
    supervisor = parts.supervisor(SupervisionConfig(max_restarts=1, restart_backoff_s=0.0, window_s=60.0))
    for _ in range(3):
        kill(child)
        assert supervisor.poll(parts.children)
        parts.clock.now += 61.0


def test_a_learner_that_never_gets_beyond_its_checkpoint_is_not_forgiven(parts: Parts) -> None:
    checkpoint = [3]
    child = parts.start(milestone=lambda: checkpoint[0])
    supervisor = parts.supervisor(SupervisionConfig(max_restarts=2, restart_backoff_s=0.0, window_s=60.0))
    for _ in range(2):
        kill(child)
        assert supervisor.poll(parts.children)
        parts.clock.now += 1000.0
    checkpoint[0] = 6
    kill(child)
    assert supervisor.poll(parts.children)  # it has come further: the two deaths at 3 are forgiven
    parts.clock.now += 1000.0
    kill(child)
    assert supervisor.poll(parts.children)
    parts.clock.now += 1000.0
    kill(child)
    with pytest.raises(ChildFailedError):
        supervisor.poll(parts.children)


def test_a_team_begins_again_together_and_its_cause_is_the_one_that_was_killed(parts: Parts) -> None:
    fails_in_its_wake = parts.start("raise SystemExit(1)", name="rank-0", restarts=Restarts.KILLED, team="ranks")
    killed = parts.start(name="rank-1", restarts=Restarts.KILLED, team="ranks")
    other = parts.start(name="redis")
    fails_in_its_wake.ready_after_s = 0.1
    fails_in_its_wake.process.wait()
    kill(killed)
    supervisor = parts.supervisor()
    assert supervisor.poll(parts.children)
    assert [fails_in_its_wake.num_restarts, killed.num_restarts, other.num_restarts] == [1, 1, 0]
    assert [line.partition(";")[0] for line in parts.said] == ["rank-1 failed with signal SIGKILL"]


@pytest.mark.parametrize("code", [1, 143, RankLostError.exit_code])
def test_the_verdict_of_a_rank_is_the_cause_also_when_those_that_lost_it_end_first(parts: Parts, code: int) -> None:
    """On a full disk rank 0 takes its time to end with 3; the other one has lost its connection meanwhile."""
    lost = parts.start(f"raise SystemExit({code})", name="rank-1", restarts=Restarts.KILLED, team="ranks")
    code_of_refused = "import time; time.sleep(2); raise SystemExit(3)"
    refused = parts.start(code_of_refused, name="rank-0", restarts=Restarts.KILLED, team="ranks")
    lost.process.wait()
    supervisor = parts.supervisor()
    assert not supervisor.poll(parts.children)
    refused.process.wait()
    with pytest.raises(ChildFailedError) as failed:
        supervisor.poll(parts.children)
    assert failed.value.child is refused
    assert parts.said == []


def test_a_rank_that_crashes_is_the_cause_and_not_the_one_that_lost_it(parts: Parts) -> None:
    """Both are found dead at once, and rank 0 stands first."""
    lost = parts.start(LOST, name="rank-0", restarts=Restarts.KILLED, team="ranks")
    crashed = parts.start("raise SystemExit(1)", name="rank-1", restarts=Restarts.KILLED, team="ranks")
    for child in (lost, crashed):
        child.process.wait()
    with pytest.raises(ChildFailedError) as failed:
        parts.supervisor().poll(parts.children)
    assert failed.value.child is crashed


def test_what_the_dead_had_started_is_gone_before_it_starts_again(parts: Parts) -> None:
    starts_one = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', '{LONG}']).pid, flush=True); {LONG}"
    )
    child, other = parts.start(starts_one), parts.start(name="other")
    wait_until(lambda: log_of(child).strip().isdigit())
    grandchild = psutil.Process(int(log_of(child)))
    kill(child)
    parts.supervisor(SupervisionConfig(restart_backoff_s=9.0)).poll(parts.children)
    wait_until(lambda: has_ended(grandchild))
    assert other.exit_code is None


def test_a_run_that_ends_kills_also_what_waits_for_its_restart(parts: Parts) -> None:
    child = parts.start()
    child.signal(signal.SIGKILL)
    child.process.wait()
    parts.supervisor(SupervisionConfig(restart_backoff_s=9.0)).poll(parts.children)
    began = time.monotonic()
    end(parts.children, grace_s=60.0)
    assert time.monotonic() - began < 30, "not after the grace"


def log_of(child: Child) -> str:
    return child.spec.log_path.read_text()


def test_a_death_that_the_supervisor_has_not_seen_yet_is_no_end(parts: Parts) -> None:
    """Found by chaos: a learner that died between a look and the question whether it had finished ended the run."""
    killed, finished = parts.start(), parts.start("pass", name="learner", may_end=True)
    kill(killed)
    finished.process.wait()
    assert not all_ended([killed])()
    assert all_ended([finished])()


def test_without_restarts_the_first_death_ends_the_run(parts: Parts) -> None:
    child = parts.start()
    kill(child)
    with pytest.raises(ChildFailedError):
        parts.supervisor(SupervisionConfig(max_restarts=0)).poll(parts.children)
