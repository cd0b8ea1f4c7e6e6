"""Child processes: started, found ready, ended with everything below them; and what is said when one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from bapo.config.tree import Config
from bapo.core.errors import StorageError
from bapo.runtime.process import dying_with_parent
from services.launcher.supervision import subreaper, supervisor
from services.launcher.supervision.child_process import Child, ProcessSpec, end
from tests.support.wait import has_ended, wait_until

GRANDCHILD = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "


def make_spec(
    tmp_path: Path, code: str, *, is_ready: Callable[[], bool] = lambda: True, may_end: bool = False
) -> ProcessSpec:
    return ProcessSpec(
        name="part",
        argv=(sys.executable, "-c", code),
        env=dict(os.environ),
        log_path=tmp_path / "part.log",
        is_ready=is_ready,
        may_end=may_end,
    )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    started: list[Child] = []

    def start_one(code: str, **options: object) -> Child:
        started.append(Child(make_spec(tmp_path, code, **options)))  # type: ignore[arg-type]
        return started[-1]

    yield start_one
    end(started, grace_s=0.0)


@pytest.mark.parametrize(
    ("code", "may_end", "exit_code", "failed"),
    [
        ("pass", True, 0, False),
        ("pass", False, 0, True),  # a service that ends, ends too early
        ("raise SystemExit(4)", True, 4, True),
        ("import os; os.kill(os.getpid(), 9)", True, 137, True),
    ],
)
def test_how_a_child_ended_tells_whether_it_failed(
    start: Callable[..., Child], code: str, may_end: bool, exit_code: int, failed: bool
) -> None:
    child = start(code, may_end=may_end)
    child.process.wait()
    assert (child.exit_code, child.has_failed) == (exit_code, failed)


def test_a_child_is_ready_when_its_probe_says_so(start: Callable[..., Child]) -> None:
    answers = iter([False, True])
    child = start("import time; time.sleep(60)", is_ready=lambda: next(answers))
    child.poll()
    assert child.ready_after_s is None
    child.poll()
    assert child.ready_after_s is not None
    child.poll()  # not asked again: the iterator is at its end


def test_a_polite_child_ends_in_its_own_way(start: Callable[..., Child], tmp_path: Path) -> None:
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: (print('bye', flush=True), sys.exit(0))); "
        "print('up', flush=True); time.sleep(60)"
    )
    child = start(code)
    wait_until(lambda: "up" in (tmp_path / "part.log").read_text())
    end([child], grace_s=10.0)
    assert (tmp_path / "part.log").read_text() == "up\nbye\n"


def test_a_deaf_child_is_killed_with_what_it_started(start: Callable[..., Child], tmp_path: Path) -> None:
    child = start(
        GRANDCHILD + "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    wait_until(lambda: "up" in (tmp_path / "part.log").read_text())
    (grandchild,) = psutil.Process(child.process.pid).children()
    began = time.monotonic()
    end([child], grace_s=0.3)
    assert time.monotonic() - began < 30, "not when it has slept"
    wait_until(lambda: has_ended(grandchild))


STRAY = """
import subprocess, sys
stray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(stray.pid, flush=True)
"""


GUARDED = [sys.executable, "-I", subreaper.__file__, sys.executable, "-c"]


def read_stray(process: subprocess.Popen[str]) -> psutil.Process:
    assert process.stdout is not None
    return psutil.Process(int(process.stdout.readline()))


@pytest.mark.parametrize(("end_of_command", "code"), [("sys.exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_a_guard_ends_as_its_command_and_leaves_no_stray(end_of_command: str, code: int) -> None:
    waiting = (
        STRAY + "sys.stdin.readline()\n" + end_of_command
    )  # until the stray has been found: it ends with the command
    with subprocess.Popen([*GUARDED, waiting], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as guarded:
        stray = read_stray(guarded)
        assert guarded.stdin is not None
        guarded.stdin.write("\n")
        guarded.stdin.flush()
        assert guarded.wait(timeout=60) == code
    assert has_ended(stray)


def test_a_guard_kills_all_when_the_launcher_has_died() -> None:
    deaf = STRAY + "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen([*GUARDED, deaf], stdout=subprocess.PIPE, text=True) as guarded:
        stray = read_stray(guarded)
        assert guarded.stdout is not None
        guarded.stdout.readline()
        guarded.send_signal(subreaper.LAUNCHER_DIED)
        assert guarded.wait(timeout=60) == -9
    assert has_ended(stray)


def test_a_log_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    spec = ProcessSpec(name="redis", argv=("true",), env={}, log_path=tmp_path / "no" / "log", is_ready=lambda: True)
    with pytest.raises(StorageError):
        Child(spec)


def test_a_failure_names_the_process_its_code_its_reason_and_a_way_out(start: Callable[..., Child]) -> None:
    child = start("import sys; print('StorageError: cannot write x: No space left on device'); sys.exit(3)")
    child.process.wait()
    message = supervisor.explain(child, Config()).splitlines()
    assert message[0] == "part failed with exit code 3: cannot write x: No space left on device"
    assert message[1].startswith("Hint: fix the reported problem (disk")
    assert message[2] == f"Log: {child.spec.log_path}"


def test_a_killed_child_is_told_from_one_that_gave_up(start: Callable[..., Child]) -> None:
    child = start("import os; os.kill(os.getpid(), 9)")
    child.process.wait()
    message = supervisor.explain(child, Config())
    assert message.startswith("part failed with signal SIGKILL: no output")
    assert "to save memory" in message


# -- children end with their parents, however these end


PARENT = """
import signal, subprocess, sys, time
from bapo.runtime.process import dying_with_parent
child = subprocess.Popen(["sleep", "1000"], preexec_fn=dying_with_parent(signal.SIGTERM))
print(child.pid, flush=True)
time.sleep(1000)
"""


def test_a_child_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert not has_ended(child)
        parent.kill()
    wait_until(lambda: has_ended(child))


def test_a_child_whose_parent_was_dead_before_it_could_ask_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = dying_with_parent(signal.SIGTERM)
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(os, "getppid", lambda: 1)  # as the kernel says it of an orphan
        ask()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


ORPHAN = """
import os, sys, time
from bapo.runtime.process import watch_parent
if os.fork() == 0:
    watch_parent(lambda: (print("orphaned", flush=True), os._exit(0)))
    print("watching", flush=True)
    time.sleep(1000)
sys.stdin.read()
"""


def test_a_child_hears_of_the_death_of_a_parent_that_did_not_know_of_it() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "watching\n"
        parent.kill()
        assert parent.stdout.readline() == "orphaned\n"
