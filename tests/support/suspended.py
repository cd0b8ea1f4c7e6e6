"""Processes that stand still for a while, as on a machine that swaps."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stopped(process: subprocess.Popen[bytes] | None) -> Iterator[None]:
    """It stands still within the block."""
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)
