"""When a run on one machine stands still, and why: what the launcher sees of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from bapo import watchdog
from bapo.waiting import who_waits
from services.launcher.snapshot import Snapshot


def mark_of(snapshot: Snapshot) -> Hashable:
    """What changes when the run moves: the buffer, the records, and processes that come up."""
    return (
        watchdog.mark_of(snapshot.status) if snapshot.status else None,
        snapshot.step,
        len(snapshot.evaluations),
        tuple((process.name, process.state) for process in snapshot.processes),
    )


def why_still(snapshot: Snapshot, stopped: Sequence[str]) -> str:
    """Who waits for whom.

    Args:
        stopped: processes that a signal has stopped.
    """
    starting = [process.name for process in snapshot.processes if process.state == "starting"]
    parts = [f"{name} is stopped (SIGSTOP; `kill -CONT` lets it go on)" for name in stopped]
    parts += [f"{name} is still starting" for name in starting]
    if snapshot.silence:
        parts.append(snapshot.silence)
    elif snapshot.status is not None:
        parts.append(who_waits(snapshot.status, snapshot.batch_size, snapshot.num_steps))
    return "; ".join(parts) or "the buffer service was never heard of"
