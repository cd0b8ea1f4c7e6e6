"""One child process: started in a session of its own, its output in a file, ended with everything it started.

    NEW --start--> STARTING --probe says so--> READY --exit--> ENDED

A child gets SIGKILL from the kernel when the launcher dies, whatever the launcher died of, so that a `kill -9` of the
launcher leaves nothing behind (Redis has written what it acknowledged; the fleet has a guard, see guard.py).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from bapo.errors import ConfigError, StorageError

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05
# Loaded before any fork: the child's side of a fork must not take the loader's lock.
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to start, and how to know that it works."""

    name: str
    """Name of its log file and of its line in the display."""
    argv: Sequence[str]
    env: Mapping[str, str]
    """The whole environment."""
    log_path: Path
    is_ready: Callable[[], bool]
    """Cheap look from outside; called until it is true."""
    hint: str = ""
    """What the display says while it starts."""
    may_end: bool = False
    """Whether exit code 0 is an expected end."""
    death_signal: signal.Signals = signal.SIGKILL
    """What the kernel sends it when the launcher dies."""


@dataclass(slots=True)
class Child:
    """A started process."""

    spec: ProcessSpec
    started_s: float = field(default_factory=time.monotonic)
    ready_after_s: float | None = None
    """Seconds from start to ready; None before that."""
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        try:
            log_file = self.spec.log_path.open("ab")
        except OSError as error:
            raise StorageError(f"cannot write {self.spec.log_path}: {error.strerror}") from error
        with log_file:
            try:
                self.process = subprocess.Popen(
                    list(self.spec.argv),
                    env=dict(self.spec.env),
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=partial(
                        _die_with_parent, self.spec.death_signal
                    ),  # one system call, and the launcher has no threads
                )
            except OSError as error:
                raise ConfigError(f"cannot start {self.spec.name} ({self.spec.argv[0]}): {error.strerror}") from error

    @property
    def name(self) -> str:
        """Name of the process."""
        return self.spec.name

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + n when signal n ended it."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    @property
    def has_failed(self) -> bool:
        """Whether it ended although it should not have."""
        code = self.exit_code
        return code is not None and not (code == 0 and self.spec.may_end)

    @property
    def age_s(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.started_s

    def look(self) -> None:
        """Notice that it has become ready."""
        if self.ready_after_s is None and self.exit_code is None and self.spec.is_ready():
            self.ready_after_s = self.age_s

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its whole session; nothing when that is gone."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def end(children: Sequence[Child], *, grace_s: float, is_hurried: Callable[[], bool] = lambda: False) -> None:
    """SIGTERM to all, SIGKILL to what is left after `grace_s` or when hurried; returns when all have ended."""
    for child in children:
        if child.exit_code is None:
            child.process.terminate()
    deadline = time.monotonic() + grace_s
    while any(child.exit_code is None for child in children) and time.monotonic() < deadline and not is_hurried():
        time.sleep(POLL_S)
    for child in children:
        # Also where the child itself has ended: what it started may still be in its session.
        child.signal(signal.SIGKILL)
        child.process.wait()


def adopt_orphans() -> None:
    """From now on, processes whose parent dies become ours, so that `kill_descendants` finds them."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants() -> list[str]:
    """SIGKILL to every process below this one, in whatever session it hides; returns their names."""
    left = psutil.Process().children(recursive=True)
    names = []
    for process in left:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                names.append(process.name())
                process.kill()
    psutil.wait_procs(left, timeout=2.0)
    return names


def _die_with_parent(number: signal.Signals) -> None:
    _libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
