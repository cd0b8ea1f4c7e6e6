"""What a forked process must not share with its parent: sockets, on which both would talk at once and hear the other's
answers, and numbers that tell one process from another.

Training loops fork (data loaders, multiprocessing) with a client in hand.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    """An object that a forked process finds in its memory."""

    def begin_again(self) -> None:
        """Called once in a new process, before anything else runs there."""
        ...


_holders: weakref.WeakSet[Inherited] = weakref.WeakSet()


def begins_again_in_children(holder: Inherited) -> None:
    """Have `holder.begin_again` called in every process that is forked from this one, while the holder lives."""
    _holders.add(holder)


def _begin_again() -> None:
    for holder in list(_holders):
        holder.begin_again()


os.register_at_fork(after_in_child=_begin_again)
