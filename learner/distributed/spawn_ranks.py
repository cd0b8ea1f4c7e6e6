"""Start all ranks of a host without a launcher (as in a container), one process each; they exit together.

    python -m learner, num_ranks = 4  -->  4 x python -m learner with RANK, WORLD_SIZE, ...; output prefixed [rank 2]

    SIGTERM, SIGINT      -> forwarded to every rank
    a rank fails         -> SIGTERM to the others, SIGKILL after END_S
    a rank is stopped    -> logged once, because all others wait for it
    this process dies    -> the kernel kills the ranks

The exit code is that of the rank that failed first, not of ranks that failed because they lost it.

Not torchrun: a killed agent leaves its ranks running, its exit code is always 1, it does not report a stopped rank,
and on one host its store listens on all addresses and unpickles what it is sent.
Not torch.multiprocessing.spawn: the last two, and its parent imports torch (seconds, 250 MB).
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import BinaryIO

import psutil

from bapo.core.errors import RankLostError
from bapo.runtime.process import dying_with_parent
from bapo.runtime.rank_environment import RANK, inherited

ASKED = 128 + signal.SIGTERM
"""Exit code after SIGTERM if a supervisor restarts the learner: 0 would mean that the run is finished."""
END_S = 30.0
"""Grace period of the others after one has exited: on GPUs a rank may wait for a lost one until its deadline."""
POLL_S = 0.1
STOPPED_S = 10.0
"""How long a rank may be stopped by a signal before it is reported."""


def run_ranks(command: Sequence[str], environments: Iterable[Mapping[str, str]], out: BinaryIO | None = None) -> int:
    """Start all ranks and wait for them; returns the exit code. Main thread only.

    Args:
        environments: environment of each rank, added to this process's.
        out: stream for their output; default: stderr.
    """
    ranks = _Ranks(out or sys.stderr.buffer)
    handlers = {number: signal.signal(number, ranks.on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ranks.start(command, environments)
        return ranks.wait()
    finally:
        ranks.kill()
        for number, handler in handlers.items():
            signal.signal(number, handler)


class _Ranks:
    def __init__(self, out: BinaryIO) -> None:
        self._out, self._lock = out, threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._names: list[str] = []
        """Rank of each process. Below, a process is its index."""
        self._signals: list[int] = []
        self._was_asked = False
        self._ends: dict[int, int] = {}
        """Process -> exit code, in the order of exit."""
        self._stopped_at: dict[int, float] = {}
        """Process -> time when it was first seen stopped; infinite once logged."""

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def start(self, command: Sequence[str], environments: Iterable[Mapping[str, str]]) -> None:
        for environment in environments:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # so that Ctrl-C reaches only this process, which forwards it once.
                start_new_session=True,
                preexec_fn=dying_with_parent(signal.SIGKILL),
                pass_fds=inherited(environment),
            )
            self._processes.append(process)
            self._names.append(f"rank {environment[RANK]}")
        for name, process in zip(self._names, self._processes, strict=True):
            assert process.stdout is not None
            reader = threading.Thread(target=self._copy, args=(f"[{name}] ".encode(), process.stdout), daemon=True)
            reader.start()
            self._readers.append(reader)

    def wait(self) -> int:
        deadline: float | None = None
        while True:
            failed = self._collect()
            if len(self._ends) == len(self._processes):
                break
            self._pass_on()
            if failed:
                self._send(signal.SIGTERM)
            self._report_stopped()
            if self._ends and deadline is None:
                deadline = time.monotonic() + END_S
            if deadline is not None and time.monotonic() > deadline:
                self.kill()
            time.sleep(POLL_S)
        self.kill()  # processes left in a rank's session would keep its output open
        for reader in self._readers:
            reader.join()
        return exit_code(list(self._ends.values()), was_asked=self._was_asked)

    def _report_stopped(self) -> None:
        now = time.monotonic()
        for i, process in enumerate(self._processes):
            if i in self._ends or not _is_stopped(process.pid):
                self._stopped_at.pop(i, None)
            elif now - self._stopped_at.setdefault(i, now) >= STOPPED_S:
                self._stopped_at[i] = math.inf
                self._log(
                    f"{self._names[i]} is stopped (SIGSTOP; resume it with `kill -CONT {process.pid}`), all others are "
                    "waiting for it"
                )

    def kill(self) -> None:
        """SIGKILL all remaining ranks and their child processes."""
        for process in self._processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def _collect(self) -> bool:
        """Record ranks that exited since the last poll; returns whether the first failure is among them."""
        had_failed = any(self._ends.values())
        # Within one poll, killed ranks come first: the others may have failed because they lost them.
        new = [(i, c) for i, p in enumerate(self._processes) if i not in self._ends and (c := p.poll()) is not None]
        for i, code in sorted(new, key=lambda end: end[1] >= 0):
            self._ends[i] = 128 - code if code < 0 else code
            if code:
                self._log(f"{self._names[i]} exited with {'signal' if code < 0 else 'exit code'} {abs(code)}")
        return not had_failed and any(self._ends.values())

    def _pass_on(self) -> None:
        while self._signals:
            self._was_asked = True
            self._send(self._signals.pop(0))

    def _send(self, number: int) -> None:
        for i, process in enumerate(self._processes):
            if i not in self._ends:
                process.send_signal(number)

    def _copy(self, prefix: bytes, lines: BinaryIO) -> None:
        for line in lines:
            self._write(prefix + line.removesuffix(b"\n") + b"\n")

    def _log(self, text: str) -> None:
        self._write(f"learner: {text}\n".encode())

    def _write(self, line: bytes) -> None:
        with self._lock:
            self._out.write(line)
            self._out.flush()


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def exit_code(ends: Sequence[int], *, was_asked: bool) -> int:
    """Exit code of all ranks: BAPO's errors (2 to 127) take precedence, because losing a peer is not the cause.

    A rank that lost a peer exits with the code of `RankLostError`, or is aborted by gloo.

    Args:
        ends: exit codes in the order of exit, 128 + n for signal n.
        was_asked: they were asked to stop, so that losing each other is not a failure: 0, or `ASKED`.
    """
    failures = sorted((code for code in ends if code), key=lambda code: code == RankLostError.exit_code)
    ours = [code for code in failures if 2 <= code < 128 and code != RankLostError.exit_code]
    if was_asked:
        failures = [code for code in failures if code == ASKED]
    return next(iter(ours or failures), 0)
