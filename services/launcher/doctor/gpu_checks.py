"""Checks of the GPUs for a config; pure, so that they can be tested without GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.runtime.machine import (
    GIB,
    VLLM_FOR_GPUS,
    engine_bytes,
    learner_bytes,
    parallelism_problem,
    ranks_on_gpus,
    worker_resources,
)
from services.launcher.doctor.checks import Check
from services.launcher.gpus.devices import Gpus
from services.launcher.gpus.plan import share_gpus

OLDEST_DRIVER = {"12": 525, "13": 580}
"""Major version of CUDA -> oldest driver (NVIDIA's table of minor version compatibility)."""
Part = Literal["all", "learner", "workers"]
"""What runs here: a container has one part."""
FOR_GPUS = "install the CUDA builds: `make setup GPU=1`"


def gpu_checks(
    config: Config,
    found: Gpus,
    *,
    vllm_build: str | None,
    is_cluster: bool,
    part: Part = "all",
    parameters: int | None = None,
) -> Iterator[Check]:
    """The GPUs, torch on them, their memory, and their assignment.

    Args:
        vllm_build: the package name of the installed vLLM.
        is_cluster: workers may be on other machines (RAY_ADDRESS).
        parameters: of the model; None: unknown.
    """
    if not found.gpus:
        yield _without(config, found, part)
        yield from _plan(config, found, is_cluster=is_cluster, part=part)
        return
    yield Check(name="gpu", status="ok", detail=_words(found))
    if (driver := _driver(found)) is not None:
        yield driver
    yield _torch(config, found)
    if config.rollout.engine == "vllm" and vllm_build != VLLM_FOR_GPUS and part != "learner":
        detail = f"there are GPUs, but {vllm_build or 'no vLLM'} is installed: workers sample on the CPU; {FOR_GPUS}"
        yield Check(name="gpus of workers", status="warn", detail=detail)
    on_gpus = ranks_on_gpus(config) or "GPU" in worker_resources(config.rollout)
    if on_gpus and config.model.dtype == "float32":
        detail = (
            'model.dtype = "float32" on GPUs: attention takes memory that grows with the square of the length, and '
            'matrix products are several times slower; set model.dtype = "bfloat16"'
        )
        yield Check(name="precision", status="warn", detail=detail)
    if parameters is not None:
        yield from _memory(config, min(gpu.memory_mib for gpu in found.gpus) << 20, parameters, part)
    yield from _plan(config, found, is_cluster=is_cluster, part=part)


def _memory(config: Config, size: int, parameters: int, part: Part) -> Iterator[Check]:
    """Parts whose weights alone do not fit into a GPU of `size` bytes."""
    settings, gpus = config.learner, worker_resources(config.rollout).get("GPU", 0)
    needs: dict[str, float] = {}
    if part != "workers" and ranks_on_gpus(config):
        needs["a rank of the learner"] = learner_bytes(config, parameters) / (
            settings.shard_ranks or settings.num_ranks
        )
    if part != "learner" and gpus:
        needs["an engine"] = engine_bytes(config, parameters) / max(1, gpus)
    for who, need in needs.items():
        if need > size:
            detail = (
                f"{who} has {need / GIB:.0f} GiB of weights, gradients and moments per GPU, which has {size / GIB:.0f} "
                "GiB: use more learner.num_ranks (learner.shard_ranks), or a larger tensor_parallel_size"
            )
            yield Check(name="gpu memory", status="fail", detail=detail)


def _without(config: Config, found: Gpus, part: Part) -> Check:
    needs_gpu = config.learner.device == "cuda" if part != "workers" else "GPU" in worker_resources(config.rollout)
    if found.problem:
        detail = (
            f"there is a GPU driver, but it does not respond: {found.problem}; check that it is loaded and matches "
            "nvidia-smi"
        )
        return Check(name="gpu", status="fail" if needs_gpu else "warn", detail=detail)
    if needs_gpu and part == "workers":
        detail = "no GPU, but a worker needs one (rollout.worker_resources)"
        return Check(name="gpu", status="fail", detail=detail)
    if needs_gpu:
        detail = "no GPU, but learner.device = cuda: use cpu, or auto, which uses GPUs if available"
        return Check(name="gpu", status="fail", detail=detail)
    return Check(name="gpu", status="ok", detail="no GPU: CPU profile")


def _plan(config: Config, found: Gpus, *, is_cluster: bool, part: Part) -> Iterator[Check]:
    """The assignment of GPUs, or why the run would not start."""
    if part != "learner" and (problem := parallelism_problem(config.rollout)):
        yield Check(name="parallelism", status="fail", detail=problem)
    try:
        # In a container the platform places workers.
        is_cluster = is_cluster or part != "all"
        plan = share_gpus(config, found.visible, with_learner=part != "workers", is_cluster=is_cluster)
    except ConfigError as error:
        yield Check(name="gpu plan", status="fail", detail=str(error))
    else:
        if plan.visible and part == "all":
            yield Check(name="gpu plan", status="ok", detail=plan.sentence())


def _words(found: Gpus) -> str:
    kinds = Counter((gpu.name, gpu.memory_mib) for gpu in found.gpus)
    gpus = ", ".join(f"{number} x {name} ({memory / 1024:.0f} GiB)" for (name, memory), number in kinds.items())
    return f"{gpus}; driver {found.driver}"


def _driver(found: Gpus) -> Check | None:
    """None if the driver is new enough for torch's CUDA, or unknown."""
    cuda = (found.torch.cuda if found.torch else None) or ""
    oldest = OLDEST_DRIVER.get(cuda.partition(".")[0])
    have = found.driver.partition(".")[0]
    if oldest is None or not have.isdigit() or int(have) >= oldest:
        return None
    detail = f"driver {found.driver} is too old for CUDA {cuda}: install {oldest} or newer"
    return Check(name="driver", status="fail", detail=detail)


def _torch(config: Config, found: Gpus) -> Check:
    name, torch = "torch on GPUs", found.torch
    if torch is None:
        return Check(name=name, status="fail", detail="torch is not installed: `make setup GPU=1`")
    if torch.cuda is None:
        detail = f"torch {torch.version} is a CPU build; {FOR_GPUS}"
        return Check(name=name, status="fail" if config.learner.device == "cuda" else "warn", detail=detail)
    if torch.error or not torch.count:
        reason = torch.error or "no GPU found; CUDA_VISIBLE_DEVICES may hide them"
        detail = f"torch {torch.version} for CUDA {torch.cuda} cannot use the GPUs: {reason}"
        return Check(name=name, status="fail", detail=detail)
    detail = f"torch {torch.version} for CUDA {torch.cuda} uses {torch.count} of {len(found.gpus)}"
    return Check(name=name, status="ok", detail=detail)
