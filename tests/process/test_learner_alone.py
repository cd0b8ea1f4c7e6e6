"""A learner that is started while another one of its run lives waits for that one's end, for a while."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo.core.errors import UnavailableError
from learner.startup import LOCK_FILE, only_learner

HOLDS = """
import sys, time
from pathlib import Path
from learner.startup import only_learner
with only_learner(Path(sys.argv[1])):
    print("alone", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A learner of the run in another process, alone by now."""
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "alone\n"
        yield process
        process.kill()


def test_a_second_learner_is_refused_as_long_as_the_first_one_lives(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    with (
        pytest.raises(UnavailableError, match="another learner"),
        only_learner(tmp_path, timeout_s=0.5),
    ):
        raise AssertionError("two at once")


def test_what_kill_9_has_ended_is_in_nobodys_way(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    threading.Timer(0.5, other.kill).start()
    with only_learner(tmp_path, timeout_s=60.0):
        assert other.wait() == -9


def test_where_there_are_no_locks_a_learner_starts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without(file: object, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", without)
    with only_learner(tmp_path):
        assert (tmp_path / LOCK_FILE).exists()
    assert "has no locks (Function not implemented)" in caplog.text
