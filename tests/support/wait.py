"""How long tests wait for what must happen.

Long, because on a loaded machine a process may not run for many seconds: only what will never happen waits so long.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep

import psutil

PATIENCE_S = 60.0
POLL_S = 0.01


def has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or a zombie: it may go between two questions."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(
    condition: Callable[[], object], *, what: str = "what was awaited", timeout_s: float = PATIENCE_S
) -> None:
    """Return when `condition()` holds; fail with `what` when it does not in time."""
    deadline = monotonic() + timeout_s
    while not condition():
        assert monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        sleep(POLL_S)
