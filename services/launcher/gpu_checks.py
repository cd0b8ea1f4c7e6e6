"""What the GPUs of a machine mean for a configuration: pure, so that it can be tried without any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from bapo.config.tree import Config
from bapo.needs import VLLM_FOR_GPUS, worker_resources
from services.launcher.checks import Check
from services.launcher.gpus import Gpu, Gpus, Torch, runs_on

FOR_GPUS = "install the builds for GPUs: `make setup GPU=1`"


def gpu_checks(config: Config, found: Gpus, *, vllm_build: str | None, is_cluster: bool) -> Iterator[Check]:
    """The GPUs, torch on them, and what workers and learner ask of them.

    Args:
        vllm_build: the package that vLLM is installed as.
        is_cluster: workers may be on other machines (RAY_ADDRESS).
    """
    if not found.gpus:
        yield _without(config, found)
        yield from _workers_without(config, is_cluster=is_cluster)
        return
    yield Check(name="gpu", status="ok", detail=_words(found))
    yield _torch(config, found)
    yield from _workers(config, found, vllm_build, is_cluster=is_cluster)


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


def _workers_without(config: Config, *, is_cluster: bool) -> Iterator[Check]:
    needs = worker_resources(config.rollout)
    if config.rollout.engine != "vllm" or "GPU" not in needs or is_cluster:
        return
    why = "rollout.worker_resources asks for GPUs" if config.rollout.worker_resources else "vLLM is its build for GPUs"
    detail = (
        f"{why}, and no GPU is here: no worker would start; use a machine with GPUs, or set up without (`make setup`)"
    )
    yield Check(name="gpus of workers", status="fail", detail=detail)


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
        status = "fail" if config.learner.device == "cuda" else "warn"
        return Check(name=name, status=status, detail=f"torch {torch.version} is a build for CPUs; {FOR_GPUS}")
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


def _workers(config: Config, found: Gpus, vllm_build: str | None, *, is_cluster: bool) -> Iterator[Check]:
    rollout, name = config.rollout, "gpus of workers"
    if rollout.engine != "vllm":
        return
    needs = worker_resources(rollout)
    if vllm_build != VLLM_FOR_GPUS:
        detail = f"GPUs are here, and {vllm_build or 'no vLLM'} is installed: workers sample on the CPU; {FOR_GPUS}"
        yield Check(name=name, status="warn", detail=detail)
        return
    if "GPU" not in needs:
        detail = (
            f"rollout.worker_resources = {needs} has no GPU, so Ray hides the GPUs from workers, and vLLM's build for "
            "GPUs cannot start: write { GPU = 1 } beside the rest, or leave the key out"
        )
        yield Check(name=name, status="fail", detail=detail)
        return
    room = int(len(found.gpus) // needs["GPU"])
    if not is_cluster and room < rollout.num_workers:
        detail = f"{len(found.gpus)} GPUs have room for {room} workers of {needs}: write --rollout.num_workers {room}"
        yield Check(name=name, status="fail", detail=detail)
        return
    yield from _shared(config, found, needs["GPU"], is_cluster=is_cluster)


def _shared(config: Config, found: Gpus, per_worker: float, *, is_cluster: bool) -> Iterator[Check]:
    """Ray knows nothing of the learner, which takes the first GPUs that it sees."""
    rollout, name = config.rollout, "gpus of workers"
    taken = rollout.num_workers * per_worker
    detail = f"{rollout.num_workers} workers take {taken:g} of {len(found.gpus)}"
    is_alone = config.learner.device == "cpu" or is_cluster or taken + config.learner.num_ranks <= len(found.gpus)
    if is_alone or "gpu_memory_utilization" in rollout.engine_options:
        yield Check(name=name, status="ok", detail=detail)
        return
    advice = (
        "the learner needs one, too: leave it room with rollout.engine_options = { gpu_memory_utilization = 0.4 }, or "
        "have fewer workers"
    )
    yield Check(name=name, status="warn", detail=f"{detail}; {advice}")


def _newer(left: str, right: str | None) -> bool:
    return right is not None and _numbers(left) > _numbers(right)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _dotted(gpu: Gpu) -> str:
    return ".".join(map(str, gpu.capability))
