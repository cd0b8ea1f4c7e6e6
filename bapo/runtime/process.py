"""Entry point of the processes of a run: `python -m <package> --config RUN/config.toml --run-dir RUN`.

Processes log to stderr (saved in RUN/logs by the launcher). A BapoError exits with one line and its exit code, without
a traceback. Any other error is a bug and shows its traceback.

A process without its own SIGTERM handler (scheduler, evaluator) exits immediately, even as PID 1 of a container, where
Linux ignores signals without a handler.
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
from bapo.runtime.standard_streams import print_any_text

log = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Flags of every process."""

    config: Config
    run: RunDirectory
    extra: argparse.Namespace
    """Process-specific flags."""


def run_process(
    name: str,
    main: Callable[[Flags], None],
    *,
    add_flags: Callable[[argparse.ArgumentParser], None] | None = None,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Read the flags, call `main` and exit: 0, or the exit code of the error."""
    print_any_text()
    parser = argparse.ArgumentParser(prog=f"python -m {name}")
    parser.add_argument("--config", required=True, help="the resolved config, RUN/config.toml")
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
        log.error("%s: %s", type(error).__name__, error)  # noqa: TRY400 - expected errors need no traceback
        sys.exit(error.exit_code)
    sys.exit(0)


def _end_as_first(number: int, frame: object) -> NoReturn:
    # Nothing is lost: the state of scheduler and evaluator is in the buffer.
    end_now(128 + number)


def end_now(code: int) -> NoReturn:
    """Exit without waiting for threads, whose work may be lost."""
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


@contextmanager
def interruptible() -> Iterator[None]:
    """Within this block Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt (main thread only)."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in Interrupts.NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


PR_SET_PDEATHSIG = 1
PARENT_POLL_S = 1.0
# Resolved before any fork: in the child, a lock held by a thread of the parent is never released.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def dying_with_parent(number: signal.Signals) -> Callable[[], None]:
    """A `preexec_fn` that makes the kernel send `number` to the child when its parent dies.

    The parent is the forking thread: its exit also triggers the signal.
    """
    parent = os.getpid()

    def ask() -> None:
        _prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # the parent has already died
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


def watch_parent(on_orphaned: Callable[[], None]) -> None:
    """Call `on_orphaned` in a thread when the parent has died; for children started by third-party code.

    getppid also changes if the dead parent remains a zombie.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        on_orphaned()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
