"""A learner that ran out of memory, told with the settings that need less of it, as they are now."""

from __future__ import annotations

import torch

from bapo.config.learner import LearnerConfig
from bapo.errors import OutOfMemoryError

REFUSALS = ("out of memory", "can't allocate memory")
"""How CUDA, NCCL and torch's allocator on CPUs say it, where it is no class of its own."""
ADVICE_OF_TORCH = " If reserved but unallocated memory"
"""How the part of torch's message begins that is of no use here."""


def out_of_memory(error: RuntimeError, learner: LearnerConfig, *, rank: int, device: torch.device) -> Exception | None:
    """`OutOfMemoryError` naming what to change; None when memory was not the cause."""
    if not isinstance(error, torch.OutOfMemoryError) and not any(words in str(error) for words in REFUSALS):
        return None
    reason = " ".join(str(error).partition(ADVICE_OF_TORCH)[0].split()).rstrip(".")
    return OutOfMemoryError(
        f"rank {rank} of the learner on {device.type}: {reason or type(error).__name__}. In a run of another name: "
        f"{'; '.join(_advice(learner))}. Where a worker shares the GPU, its rollout.engine_options may take less "
        "(gpu_memory_utilization, kv_cache_memory_bytes)"
    )


def _advice(learner: LearnerConfig) -> list[str]:
    """In the order in which they cost least."""
    now = learner.gradient_checkpointing
    recompute = [] if now is True else [f"learner.gradient_checkpointing = true (now {str(now).lower()})"]
    return [
        *recompute,
        f"a smaller learner.microbatch_tokens (now {learner.microbatch_tokens}), down to one prompt with its response",
        f"a smaller learner.logprob_chunk_tokens (now {learner.logprob_chunk_tokens})",
        f"more learner.num_ranks (now {learner.num_ranks}), which share weights, gradients and moments",
    ]
