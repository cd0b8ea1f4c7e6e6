"""Out-of-memory diagnosis: whether it killed a worker, and which setting to change.

A worker runs out of memory in three ways: an allocation raises, Ray's memory monitor kills it, or the kernel kills it
without a message. The last is detected by the kernel's counter of OOM kills on this host.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from bapo.core.errors import OutOfMemoryError
from rollout_server.fleet.worker_handle import WorkerDiedError

COUNTERS = (
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
    Path("/proc/vmstat"),
)
"""The kernel's OOM kill counters: of the container (cgroup v2, v1) and of the host."""
REFUSALS = (
    "MemoryError",
    "can't allocate memory",
    "out of memory",
    "OutOfMemory",
    "Cannot allocate memory",
    "No available memory for the cache blocks",
    "allocation is less than requested memory",
    "is less than desired CPU memory utilization",
    "is less than desired GPU memory utilization",
    "low on memory",
)
"""Messages of Python, torch, CUDA, the C library, vLLM and Ray."""
ADVICE = (
    "lower rollout.max_groups_in_flight, the engine's cache (rollout.engine_options: kv_cache_memory_bytes, or "
    "gpu_memory_utilization on a GPU) or rollout.num_workers, or give the machine more memory"
)


@dataclass(frozen=True)
class MemoryWatch:
    """The kernel's OOM kill counter when a worker started."""

    num_kills: int

    @classmethod
    def begin(cls) -> MemoryWatch:
        """Read the counter."""
        return cls(num_kills=count_kills())

    def explain(self, error: Exception, *, rss_bytes: int) -> Exception:
        """The same error, or `OutOfMemoryError` if memory was the cause.

        Args:
            rss_bytes: resident memory in the worker's last report; 0 without one.
        """
        if isinstance(error, OutOfMemoryError):
            return error
        text = f"{type(error).__name__}: {error}"
        if any(words in text for words in REFUSALS):
            return OutOfMemoryError(f"out of memory: {_last_line(error)}. {_figures(rss_bytes)}; {ADVICE}")
        # Only if it died without a message: the kernel kills graders first, which the worker survives.
        if isinstance(error, WorkerDiedError) and count_kills() > self.num_kills:
            return OutOfMemoryError(
                f"out of memory: the kernel has OOM-killed a process on this host since the worker started, and the "
                f"worker has died ({error}). {_figures(rss_bytes)}; {ADVICE}"
            )
        return error


def count_kills() -> int:
    """Number of processes that the kernel has OOM-killed in this container or on this host."""
    counts = [_read_count(path) for path in COUNTERS if path.is_file()]
    return max(counts, default=0)


def _read_count(path: Path) -> int:
    rows = (line.split() for line in path.read_text().splitlines())
    return sum(int(row[1]) for row in rows if len(row) == 2 and row[0] == "oom_kill")


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _figures(rss_bytes: int) -> str:
    free = psutil.virtual_memory().available / 2**30
    used = f"the worker last used {rss_bytes / 2**30:.1f} GiB, " if rss_bytes else ""
    return f"{used}{free:.1f} GiB are free now"
