"""Checks of the GPUs for a config; pure, so that they can be tested without GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.runtime.machine import VLLM_FOR_GPUS, parallelism_problem, ranks_on_gpus, worker_resources
from services.launcher.doctor.checks import Check
from services.launcher.gpus.devices import Gpus
from services.launcher.gpus.plan import share_gpus

OLDEST_DRIVER = {"12": 525, "13": 580}
"""Major version of CUDA -> oldest driver (NVIDIA's table of minor version compatibility)."""
FOR_GPUS = "install the CUDA builds: `make setup GPU=1`"


def gpu_checks(config: Config, found: Gpus, *, vllm_build: str | None, is_cluster: bool) -> Iterator[Check]:
    """The GPUs, torch on them, and their assignment.

    Args:
        vllm_build: the package name of the installed vLLM.
        is_cluster: workers may be on other machines (RAY_ADDRESS).
    """
    if not found.gpus:
        yield _without(config, found)
        yield from _plan(config, found, is_cluster=is_cluster)
        return
    yield Check(name="gpu", status="ok", detail=_words(found))
    if (driver := _driver(found)) is not None:
        yield driver
    yield _torch(config, found)
    if config.rollout.engine == "vllm" and vllm_build != VLLM_FOR_GPUS:
        detail = f"there are GPUs, but {vllm_build or 'no vLLM'} is installed: workers sample on the CPU; {FOR_GPUS}"
        yield Check(name="gpus of workers", status="warn", detail=detail)
    on_gpus = ranks_on_gpus(config) or "GPU" in worker_resources(config.rollout)
    if on_gpus and config.model.dtype == "float32":
        detail = (
            'model.dtype = "float32" on GPUs: attention takes memory that grows with the square of the length, and '
            'matrix products are several times slower; set model.dtype = "bfloat16"'
        )
        yield Check(name="precision", status="warn", detail=detail)
    yield from _plan(config, found, is_cluster=is_cluster)


def _without(config: Config, found: Gpus) -> Check:
    if found.problem:
        detail = (
            f"there is a GPU driver, but it does not respond: {found.problem}; check that it is loaded and matches "
            "nvidia-smi"
        )
        return Check(name="gpu", status="fail" if config.learner.device == "cuda" else "warn", detail=detail)
    if config.learner.device == "cuda":
        detail = "no GPU, but learner.device = cuda: use cpu, or auto, which uses GPUs if available"
        return Check(name="gpu", status="fail", detail=detail)
    return Check(name="gpu", status="ok", detail="no GPU: CPU profile")


def _plan(config: Config, found: Gpus, *, is_cluster: bool) -> Iterator[Check]:
    """The assignment of GPUs, or why the run would not start."""
    if problem := parallelism_problem(config.rollout):
        yield Check(name="parallelism", status="fail", detail=problem)
    try:
        plan = share_gpus(config, found.visible, is_cluster=is_cluster)
    except ConfigError as error:
        yield Check(name="gpu plan", status="fail", detail=str(error))
    else:
        if plan.visible:
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
