"""A child that ends with its parent, whatever the parent died of: the kernel sends it a signal, or it looks."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

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
    """Call that in a thread of its own when the parent is gone; for a child that somebody else's code has started.

    By the kernel's word for the parent of this process, which changes also where a dead parent stays a zombie, because
    nobody waits for it.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        on_orphaned()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
