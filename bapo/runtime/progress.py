"""Progress of what may take longer than two seconds, on stderr: nothing before that, then a line that says how far."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_S = 2.0
EVERY_S = 5.0
TERMINAL_S = 0.5
"""In a terminal the line is rewritten."""

Note = Callable[[str], None]


def silent(text: str) -> None:
    """A note for callers without progress."""


@contextmanager
def progress(what: str, *, first_s: float = FIRST_S, every_s: float = EVERY_S) -> Iterator[Note]:
    """Say `what`, and the newest note on how far it is, while the block runs.

    Yields: takes a note, such as "step 40 of 120"; cheap.
    """
    note, ended = "", threading.Event()

    def take(text: str) -> None:
        nonlocal note
        note = text

    def tell() -> None:
        is_terminal = sys.stderr.isatty()
        wait_s = first_s
        while not ended.wait(wait_s):
            line = f"{what}{': ' if note else ''}{note} ..."
            sys.stderr.write(f"\r\x1b[K{line}" if is_terminal else f"{line}\n")
            sys.stderr.flush()
            wait_s = TERMINAL_S if is_terminal else every_s
        if is_terminal and wait_s != first_s:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    # A thread: the block may be one long call of a library.
    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield take
    finally:
        ended.set()
        thread.join()
