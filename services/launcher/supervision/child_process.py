"""One child process: started in a session of its own, its output in a file, ended with everything it started.

    NEW --start--> STARTING --probe says so--> READY --exit--> ENDED
                      ^                                          |
                      +------ the supervisor starts it again ----+

A child gets SIGKILL from the kernel when the launcher dies, whatever the launcher died of, so that a `kill -9` of the
launcher leaves nothing behind (Redis has written what it acknowledged; the rollout server runs below subreaper.py).
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
from enum import Enum
from pathlib import Path

import psutil

from bapo.core.errors import ConfigError, StorageError
from bapo.runtime.process import dying_with_parent

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05
# Loaded before any fork: the child's side of a fork must not take the loader's lock.
_libc = ctypes.CDLL(None, use_errno=True)


class Restarts(Enum):
    """After which deaths a process may be started again. An exit code from 2 on is a verdict, never an accident."""

    NEVER = "never"
    KILLED = "killed"
    CRASHED = "crashed"
    """Ended by a signal, by an unexpected exception, or with 0 although it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    name: str
    """Name of its log file and of its line in the display."""
    argv: Sequence[str]
    env: Mapping[str, str]
    log_path: Path
    is_ready: Callable[[], bool]
    """Cheap look from outside; called until it is true."""
    hint: str = ""
    may_end: bool = False
    """Whether exit code 0 is an expected end."""
    restarts: Restarts = Restarts.NEVER
    """After which deaths it may be started again."""
    again: Callable[[], Sequence[str]] = tuple
    """Further arguments of a second start, asked for at that time."""
    is_optional: bool = False
    """Whether the run continues without it when it cannot be started again."""
    team: str = ""
    """Processes of one team can only begin again together."""
    milestone: Callable[[], int] | None = None
    """How far it has come for good; a death at the same milestone as the last one is never forgiven."""
    death_signal: signal.Signals = signal.SIGKILL
    """What the kernel sends it when the launcher dies."""
    pass_fds: Sequence[int] = ()
    """Descriptors of this process that it uses."""


@dataclass(slots=True)
class Child:
    """A started process, and after its death the next one in its place."""

    spec: ProcessSpec
    started_s: float = field(init=False)
    ready_after_s: float | None = field(init=False, default=None)
    """Seconds from start to ready; None before that."""
    process: subprocess.Popen[bytes] = field(init=False)
    num_restarts: int = field(init=False, default=0)
    restart_at_s: float | None = field(init=False, default=None)
    """Monotonic time of its next start; None when none is due."""
    is_given_up: bool = field(init=False, default=False)
    """It is optional, has failed, and stays away."""

    def __post_init__(self) -> None:
        self._start(self.spec.argv)

    def start_again(self) -> None:
        """The next process of this place. Raises: ConfigError, StorageError."""
        self.restart_at_s = None
        self.num_restarts += 1
        self._start([*self.spec.argv, *self.spec.again()])

    def _start(self, argv: Sequence[str]) -> None:
        self.started_s, self.ready_after_s = time.monotonic(), None
        try:
            log_file = self.spec.log_path.open("ab")
        except OSError as error:
            raise StorageError(f"cannot write {self.spec.log_path}: {error.strerror}") from error
        with log_file:
            try:
                self.process = subprocess.Popen(
                    list(argv),
                    env=dict(self.spec.env),
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=dying_with_parent(self.spec.death_signal),
                    pass_fds=self.spec.pass_fds,
                )
            except OSError as error:
                raise ConfigError(f"cannot start {self.spec.name} ({self.spec.argv[0]}): {error.strerror}") from error

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + n when signal n ended it."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    @property
    def has_failed(self) -> bool:
        """Whether it ended although it should not have."""
        if self.is_given_up:
            return False
        code = self.exit_code
        return code is not None and not (code == 0 and self.spec.may_end)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended as it may. One that failed is the supervisor's: it may be back at once."""
        return self.exit_code is not None and not self.has_failed

    @property
    def was_killed(self) -> bool:
        code = self.process.poll()
        return code is not None and code < 0

    @property
    def may_start_again(self) -> bool:
        """Whether such a death is an accident. One that never worked would not work the next time either."""
        if self.ready_after_s is None and self.num_restarts == 0:
            return False
        if self.spec.restarts is Restarts.KILLED:
            return self.was_killed
        return self.spec.restarts is Restarts.CRASHED and (self.was_killed or self.exit_code in (0, 1))

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_s

    def poll(self) -> None:
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


def kill_descendants(but: Sequence[Child] = ()) -> list[str]:
    """SIGKILL to every process below this one, in whatever session it hides; returns their names.

    Args:
        but: these, and what is below them, live on.
    """
    spared = {child.process.pid for child in but}
    top = [process for process in psutil.Process().children() if process.pid not in spared]
    left = [*top, *(below for process in top for below in _below(process))]
    names = []
    for process in left:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                names.append(process.name())
                process.kill()
    psutil.wait_procs(left, timeout=2.0)
    return names


def _below(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []
