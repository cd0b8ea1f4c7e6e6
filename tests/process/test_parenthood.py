"""Children end with their parents, however these end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from bapo.runtime.process import dying_with_parent
from tests.support.wait import has_ended, wait_until

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
