"""A child that ends with its parent, whatever the parent died of: the kernel sends it a signal."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1
# Loaded before any fork: the child's side of a fork must not take the loader's lock.
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: signal.Signals) -> None:
    """Ask the kernel for a signal at the parent's death; to be called by the child between fork and exec."""
    _libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
