"""One child process: in its own session, with output in a file, stopped together with its descendants.

    NEW --start--> STARTING --probe succeeds--> READY --exit--> ENDED
                      ^                                           |
                      +------ restarted by the supervisor --------+

The kernel sends SIGKILL to a child when the launcher dies, so that `kill -9` of the launcher leaves nothing behind
(Redis has written what it acknowledged; the rollout server runs below subreaper.py).
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
# Loaded before any fork: the child must not acquire the loader's lock.
_libc = ctypes.CDLL(None, use_errno=True)


class Restarts(Enum):
    """When a process may be restarted. Exit codes from 2 on are fatal, never a retryable crash."""

    NEVER = "never"
    KILLED = "killed"
    CRASHED = "crashed"
    """Killed by a signal, crashed by an unexpected exception, or exited with 0 although it is a service."""
    USER_CODE = "user_code"
    """The same, and any exit code but that of a wrong configuration: code of the user's may exit with any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    name: str
    """Name of its log file and in the display."""
    argv: Sequence[str]
    env: Mapping[str, str]
    log_path: Path
    is_ready: Callable[[], bool]
    """Cheap readiness probe; called until it returns true."""
    hint: str = ""
    may_end: bool = False
    """Whether exit code 0 is expected."""
    restarts: Restarts = Restarts.NEVER
    """When it may be restarted."""
    again: Callable[[], Sequence[str]] = tuple
    """Additional arguments of a restart, computed at that time."""
    is_optional: bool = False
    """Whether the run continues without it if it cannot be restarted."""
    team: str = ""
    """Processes of a team are restarted together."""
    milestone: Callable[[], int] | None = None
    """Durable progress; a crash at the same milestone as the previous one is never retried."""
    death_signal: signal.Signals = signal.SIGKILL
    """Signal sent by the kernel when the launcher dies."""
    pass_fds: Sequence[int] = ()
    """File descriptors it inherits."""


@dataclass(slots=True)
class Child:
    """A started process and its restarts."""

    spec: ProcessSpec
    started_s: float = field(init=False)
    ready_after_s: float | None = field(init=False, default=None)
    """Seconds from start to ready; None if not ready yet."""
    process: subprocess.Popen[bytes] = field(init=False)
    num_restarts: int = field(init=False, default=0)
    restart_at_s: float | None = field(init=False, default=None)
    """Monotonic time of the scheduled restart; None if none is scheduled."""
    is_given_up: bool = field(init=False, default=False)
    """Optional, failed, and not restarted."""

    def __post_init__(self) -> None:
        self._start(self.spec.argv)

    def start_again(self) -> None:
        """Restart the process. Raises: ConfigError, StorageError."""
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
        """None while it runs; 128 + n if killed by signal n."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    @property
    def has_failed(self) -> bool:
        """Whether it exited unexpectedly."""
        if self.is_given_up:
            return False
        code = self.exit_code
        return code is not None and not (code == 0 and self.spec.may_end)

    @property
    def has_ended(self) -> bool:
        """Whether it exited as expected. A failed one is handled by the supervisor and may be restarted immediately."""
        return self.exit_code is not None and not self.has_failed

    @property
    def was_killed(self) -> bool:
        code = self.process.poll()
        return code is not None and code < 0

    @property
    def may_start_again(self) -> bool:
        """Whether the crash is retryable. A process that was never ready is not restarted."""
        if self.ready_after_s is None and self.num_restarts == 0:
            return False
        if self.spec.restarts is Restarts.KILLED:
            return self.was_killed
        if self.spec.restarts is Restarts.USER_CODE:
            return self.exit_code != ConfigError.exit_code
        return self.spec.restarts is Restarts.CRASHED and (self.was_killed or self.exit_code in (0, 1))

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_s

    def poll(self) -> None:
        """Check whether it has become ready."""
        if self.ready_after_s is None and self.exit_code is None and self.spec.is_ready():
            self.ready_after_s = self.age_s

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its whole session, if it exists."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def end(children: Sequence[Child], *, grace_s: float, is_hurried: Callable[[], bool] = lambda: False) -> None:
    """SIGTERM to all, SIGKILL after `grace_s` or when hurried; returns when all have exited."""
    for child in children:
        if child.exit_code is None:
            child.process.terminate()
    deadline = time.monotonic() + grace_s
    while any(child.exit_code is None for child in children) and time.monotonic() < deadline and not is_hurried():
        time.sleep(POLL_S)
    for child in children:
        # Even if the child itself has exited: its descendants may still be in its session.
        child.signal(signal.SIGKILL)
        child.process.wait()


def adopt_orphans() -> None:
    """Become the subreaper of orphaned descendants, so that `kill_descendants` finds them."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants(but: Sequence[Child] = ()) -> list[str]:
    """SIGKILL all descendants of this process, in any session; returns their names.

    Args:
        but: exclude these and their descendants.
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
