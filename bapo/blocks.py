"""Memory of batches, used again for the next one when nobody looks at it any more.

A batch has 1 to 130 MB. New memory of that size comes from the kernel page by page, which costs as much as filling it.
"""

from __future__ import annotations

import threading

from bapo.forks import begins_again_in_children

MOST_BLOCKS = 2
"""One that is trained on, and one that comes meanwhile."""
SPARE = 8
"""A block has an eighth of its size to spare: batches differ."""


class Blocks:
    """Thread-safe."""

    def __init__(self) -> None:
        self.begin_again()
        begins_again_in_children(self)

    def begin_again(self) -> None:
        """Without blocks; in a forked process a thread that is not there any more may have had the lock."""
        self._lock = threading.Lock()
        self._blocks: list[bytearray] = []

    def take(self, num_bytes: int) -> memoryview:
        """Memory of this size, with anything in it. It is free again when no view of it, or array on it, is left."""
        with self._lock:
            free = next((block for block in self._blocks if _is_free(block)), None)
            if free is None or len(free) < num_bytes:
                self._blocks = [block for block in self._blocks if block is not free][1 - MOST_BLOCKS :]
                free = bytearray(num_bytes + num_bytes // SPARE + 1)
                self._blocks.append(free)
            return memoryview(free)[:num_bytes]


def _is_free(block: bytearray) -> bool:
    """Python lets nobody resize a bytearray that somebody looks at."""
    try:
        block.append(block.pop())
    except BufferError:
        return False
    return True
