"""A child that ends with its parent, whatever the parent died of: the kernel sends it a signal."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
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
