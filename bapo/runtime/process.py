"""How a process of a run starts and ends: `python -m <package> --config RUN/config.toml --run-dir RUN`.

It logs to stderr (the launcher keeps that in RUN/logs), and an error of the tree in `bapo.core.errors` ends it with
one line and the exit code of its class, without a traceback. Any other error is a bug and shows its traceback.

A process that has no handling of SIGTERM of its own (scheduler, evaluator) ends by it at once; also as process 1 of a
container, for whom Linux ignores signals without a handler.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from bapo.config.load import load_resolved
from bapo.config.tree import Config
from bapo.core.errors import BapoError
from bapo.runtime.auth.token_store import find_tokens
from bapo.runtime.logs import hush_server
from bapo.runtime.run_directory.layout import RunDirectory

log = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What every process is started with."""

    config: Config
    run: RunDirectory
    extra: argparse.Namespace
    """The process's own flags."""


def run_process(
    name: str,
    main: Callable[[Flags], None],
    *,
    add_flags: Callable[[argparse.ArgumentParser], None] | None = None,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Read the flags, call `main` and exit: 0, or the exit code of the error."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}")
    parser.add_argument("--config", required=True, help="the resolved configuration, RUN/config.toml")
    parser.add_argument("--run-dir", required=True, help="the run directory")
    if add_flags:
        add_flags(parser)
    extra = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    hush_server()
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _end_as_first)
    try:
        run = RunDirectory(extra.run_dir)
        find_tokens(run.path, name)
        main(Flags(config=load_resolved(extra.config), run=run, extra=extra))
    except BapoError as error:
        log.error("%s: %s", type(error).__name__, error)  # noqa: TRY400 - an expected end needs no traceback
        sys.exit(error.exit_code)
    sys.exit(0)


def _end_as_first(number: int, frame: object) -> NoReturn:
    # Nothing is lost: what scheduler and evaluator have acknowledged is in the buffer.
    end_now(128 + number)


def end_now(code: int) -> NoReturn:
    """End without waiting for threads: what they do must be lost without harm."""
    logging.shutdown()
    os._exit(code)


class Interrupts:
    """Counts Ctrl-C, SIGTERM and SIGHUP: the first asks for a clean end, the second for an immediate one."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = 0

    def install(self) -> None:
        """From now on they are counted instead of ending the process (main thread only)."""
        for number in self.NUMBERS:
            signal.signal(number, self._on_signal)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """`install` within this block."""
        before = {number: signal.getsignal(number) for number in self.NUMBERS}
        self.install()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def asked(self) -> bool:
        return self.count > 0

    @property
    def hurried(self) -> bool:
        """Whether it should end without grace."""
        return self.count > 1

    def _on_signal(self, number: int, frame: object) -> None:
        self.count += 1


PR_SET_PDEATHSIG = 1
PARENT_POLL_S = 1.0
# Found before any fork: on the child's side a lock that a thread of the parent holds is held for ever.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def dying_with_parent(number: signal.Signals) -> Callable[[], None]:
    """What a child does between fork and exec (`preexec_fn`): it has the kernel send it `number` at its parent's death.

    The parent is the thread that forks: one that ends takes its children along.
    """
    parent = os.getpid()

    def ask() -> None:
        _prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it has died before we asked
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


def watch_parent(on_orphaned: Callable[[], None]) -> None:
    """Call `on_orphaned` in a thread when the parent is gone; for a child that third-party code has started.

    getppid changes also where a dead parent stays a zombie, because no process reaps it.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        on_orphaned()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
