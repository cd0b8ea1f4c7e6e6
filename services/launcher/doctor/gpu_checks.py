"""What the GPUs of a machine mean for a configuration: pure, so that it can be tried without any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.runtime.machine import VLLM_FOR_GPUS
from services.launcher.doctor.checks import Check
from services.launcher.gpus.devices import Gpu, Gpus, Torch, runs_on
from services.launcher.gpus.plan import share_gpus

FOR_GPUS = "install the builds for GPUs: `make setup GPU=1`"


def gpu_checks(config: Config, found: Gpus, *, vllm_build: str | None, is_cluster: bool) -> Iterator[Check]:
    """The GPUs, torch on them, and whose they are.

    Args:
        vllm_build: the package that vLLM is installed as.
        is_cluster: workers may be on other machines (RAY_ADDRESS).
    """
    if not found.gpus:
        yield _without(config, found)
        yield from _plan(config, found, is_cluster=is_cluster)
        return
    yield Check(name="gpu", status="ok", detail=_words(found))
    yield _torch(config, found)
    if config.rollout.engine == "vllm" and vllm_build != VLLM_FOR_GPUS:
        detail = f"GPUs are here, and {vllm_build or 'no vLLM'} is installed: workers sample on the CPU; {FOR_GPUS}"
        yield Check(name="gpus of workers", status="warn", detail=detail)
    yield from _plan(config, found, is_cluster=is_cluster)


def _without(config: Config, found: Gpus) -> Check:
    if found.problem:
        detail = (
            f"there is a driver for GPUs, but it does not answer: {found.problem}; is it loaded, and of one version?"
        )
        return Check(name="gpu", status="fail" if config.learner.device == "cuda" else "warn", detail=detail)
    if config.learner.device == "cuda":
        detail = "no GPU, but learner.device = cuda: write cpu, or auto, which takes what there is"
        return Check(name="gpu", status="fail", detail=detail)
    return Check(name="gpu", status="ok", detail="no GPU: CPU profile")


def _plan(config: Config, found: Gpus, *, is_cluster: bool) -> Iterator[Check]:
    """As a run would share them out, or why it would not start."""
    try:
        plan = share_gpus(config, found.visible, is_cluster=is_cluster)
    except ConfigError as error:
        yield Check(name="gpu plan", status="fail", detail=str(error))
    else:
        if plan.visible:
            yield Check(name="gpu plan", status="ok", detail=plan.sentence())


def _words(found: Gpus) -> str:
    kinds = Counter((gpu.name, gpu.memory_mib, gpu.capability) for gpu in found.gpus)
    gpus = ", ".join(
        f"{number} x {name} ({memory / 1024:.0f} GiB, compute capability {major}.{minor})"
        for (name, memory, (major, minor)), number in kinds.items()
    )
    return f"{gpus}; driver {found.driver}, for CUDA up to {found.driver_cuda or 'an unknown version'}"


def _torch(config: Config, found: Gpus) -> Check:
    name, torch = "torch on GPUs", found.torch
    if torch is None:
        return Check(name=name, status="fail", detail="torch is not installed: `make setup GPU=1`")
    if torch.cuda is None:
        detail = f"torch {torch.version} is a build for CPUs; {FOR_GPUS}"
        return Check(name=name, status="fail" if config.learner.device == "cuda" else "warn", detail=detail)
    if (problem := _misfit(config, found, torch)) is not None:
        return Check(name=name, status="fail", detail=problem)
    nccl = f"NCCL {torch.nccl}" if torch.nccl else "no NCCL"
    detail = f"torch {torch.version} for CUDA {torch.cuda} uses {torch.count} of {len(found.gpus)}; {nccl}"
    if _newer(torch.cuda, found.driver_cuda):
        detail += f"; the driver is for CUDA {found.driver_cuda}: kernels that are compiled here may need a newer one"
        return Check(name=name, status="warn", detail=detail)
    return Check(name=name, status="ok", detail=detail)


def _misfit(config: Config, found: Gpus, torch: Torch) -> str | None:
    """Why torch cannot use the GPUs; None when it can."""
    cuda = str(torch.cuda)
    if found.driver_cuda and cuda.partition(".")[0] > found.driver_cuda.partition(".")[0]:
        return (
            f"torch {torch.version} is built for CUDA {cuda}, and driver {found.driver} is for CUDA up to "
            f"{found.driver_cuda}: install a newer driver, or torch for CUDA {found.driver_cuda.partition('.')[0]}"
        )
    if torch.error or not torch.count:
        return f"torch {torch.version} finds no GPU: {torch.error or 'CUDA_VISIBLE_DEVICES may hide them'}"
    unfit = [gpu for gpu in found.gpus if torch.architectures and not runs_on(torch.architectures, gpu.capability)]
    if unfit:
        gpu, have = unfit[0], " ".join(torch.architectures)
        return f"torch {torch.version} has no code for {gpu.name} (compute capability {_dotted(gpu)}): it has {have}"
    if config.learner.num_ranks > 1 and not torch.nccl:
        return f"learner.num_ranks = {config.learner.num_ranks} needs NCCL, and torch {torch.version} has none"
    return None


def _newer(left: str, right: str | None) -> bool:
    return right is not None and _numbers(left) > _numbers(right)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _dotted(gpu: Gpu) -> str:
    return ".".join(map(str, gpu.capability))
