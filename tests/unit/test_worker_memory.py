"""A worker that ran out of memory is told from one that died of something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo.core.errors import ConfigError, OutOfMemoryError, UnavailableError
from rollout_server.fleet.out_of_memory import MemoryWatch, count_kills
from rollout_server.fleet.worker_handle import WorkerDiedError

REFUSED_BY_TORCH = UnavailableError(
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 1099511627776 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file in which the kernel counts its kills."""
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\nhigh 0\nmax 41\noom 2\noom_kill 2\noom_group_kill 0\n")
    monkeypatch.setattr("rollout_server.fleet.out_of_memory.COUNTERS", (counter, tmp_path / "not-there"))
    return counter


@pytest.mark.parametrize(
    "error",
    [
        REFUSED_BY_TORCH,
        UnavailableError("MemoryError: "),
        UnavailableError("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
        UnavailableError("ValueError: No available memory for the cache blocks. Try increasing it"),
        UnavailableError(
            "ValueError: Available memory on node 0 (19.2/23.5 GiB) on kv cache allocation is less than "
            "requested memory for kv (16384.0 GiB). Decrease --kv-cache-memory-bytes"
        ),
        WorkerDiedError("its process is gone: Task was killed due to the node running low on memory."),
    ],
)
def test_a_refused_allocation_names_the_settings_that_help(kernel: Path, error: Exception) -> None:
    told = MemoryWatch.begin().explain(error, rss_bytes=3 * 2**30)
    assert isinstance(told, OutOfMemoryError)
    assert str(error).strip().splitlines()[-1] in str(told)
    assert "the worker last held 3.0 GiB" in str(told)
    assert "rollout.max_groups_in_flight" in str(told)


def test_a_silent_death_is_memory_when_the_kernel_has_killed_since_the_start(kernel: Path) -> None:
    watch = MemoryWatch.begin()
    kernel.write_text(kernel.read_text().replace("oom_kill 2", "oom_kill 3"))
    told = watch.explain(WorkerDiedError("its process is gone: it died"), rss_bytes=0)
    assert isinstance(told, OutOfMemoryError)
    assert "the kernel has killed a process of this host since the worker started" in str(told)
    assert "last held" not in str(told), "it never reported"


@pytest.mark.parametrize(
    "error", [ConfigError("no such option"), UnavailableError("RuntimeError: a bug"), TimeoutError()]
)
def test_a_death_that_says_why_is_not_memory_because_a_grader_was_killed_before(kernel: Path, error: Exception) -> None:
    watch = MemoryWatch.begin()
    kernel.write_text(kernel.read_text().replace("oom_kill 2", "oom_kill 3"))
    assert watch.explain(error, rss_bytes=1) is error


@pytest.mark.parametrize("error", [WorkerDiedError("its process is gone"), ConfigError("no such engine option")])
def test_any_other_death_stays_what_it_was(kernel: Path, error: Exception) -> None:
    assert MemoryWatch.begin().explain(error, rss_bytes=1) is error


def test_kills_are_counted_in_the_files_that_this_kernel_has(kernel: Path) -> None:
    assert count_kills() == 2
    kernel.unlink()
    assert count_kills() == 0
