"""How the policy is optimized, what of it is kept, and what is measured of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bapo.algorithms.settings import MOST_SECONDS, Frozen
from bapo.config.rollout import GpuIndices


class LearnerConfig(Frozen):
    """Optimization."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(10, ge=0)
    """Learner steps of linear warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up, until the last step of the run."""
    lr_final: float = Field(0.0, ge=0, le=1)
    """Share of `lr` at the last step, where it falls."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW."""
    grad_clip: float = Field(1.0, gt=0)
    """Most L2 norm of the gradient."""
    minibatch_size: int = Field(64, ge=1)
    """Groups per optimizer step; a batch is cut into near-equal mini-batches (docs/paper.md, Decisions)."""
    epochs: int = Field(1, ge=1)
    """Passes over one batch."""
    epochs_until: int | None = Field(None, ge=1)
    """Behind this step one pass is made (T of ReMix); null: always `epochs`."""
    reset_optimizer: bool = False
    """Forget Adam's moments at the start of every step (Kimi k1.5)."""
    microbatch_tokens: int = Field(4096, ge=64)
    """Token budget of one forward and backward pass; does not change the loss."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Keep each decoder layer's input alone and compute the rest again in the backward pass: less memory for a third
    more arithmetic, the same loss and gradients. auto: on CUDA, not on the CPU."""
    logprob_chunk_tokens: int = Field(1024, ge=1)
    """Tokens whose logits exist at one time."""
    num_ranks: int = Field(1, ge=1)
    """Learner processes (FSDP2)."""
    num_threads: int = Field(1, ge=1)
    """CPU threads per rank."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is one."""
    gpus: GpuIndices | None = None
    """GPUs of this machine that are the learner's, one per rank, as torch numbers what it sees; null: the first
    `num_ranks` that are not in `rollout.gpus` (docs/cluster.md)."""
    batch_timeout_s: float = Field(600.0, gt=0, le=MOST_SECONDS)
    """Seconds without any progress: learner and evaluator stop with a named reason when they wait and no group arrived
    for this long, for any purpose. Longer than the longest response takes."""
    port: int = Field(8702, ge=0, le=65535)
    """Health and metrics of rank 0; 0 takes a free port."""


class CheckpointConfig(Frozen):
    """What survives."""

    every: int = Field(10, ge=1)
    """Steps between checkpoints. One joins weights, optimizer, data position, random state and buffer."""
    keep_last: int = Field(3, ge=1)
    """Older checkpoints are removed."""
    keep_batches: bool = True
    """Keep the batches after the oldest checkpoint (RUN/batches), so that `bapo replay` can repeat a step:
    as many bytes as the buffer sent for `every` x `keep_last` steps."""


class DiagnosticsConfig(Frozen):
    """How far the policy is from the policies that sampled its batch (docs/monitoring.md)."""

    every: int = Field(1, ge=0)
    """Learner steps between two measurements; 0: none. They cost no forward pass."""
    tv_warn: float = Field(0.05, gt=0, le=1)
    """A subset or age whose mean total variation per token is more than this is warned of."""
    ess_warn: float = Field(0.5, ge=0, lt=1)
    """A subset or age whose effective share of responses is less than this is warned of."""
    token_records: int = Field(0, ge=0)
    """Learner steps between two token records: text, entropy, ratio and clipping of every token of the batch, for the
    run's page (docs/monitoring.md); 0: none. They cost no forward pass."""
    token_records_mb: int = Field(256, ge=1)
    """Most MB of texts and token records on disk (RUN/token_records); beyond it the oldest are removed."""
    texts: int = Field(1, ge=0)
    """Learner steps between two steps whose responses are kept as text for the run's page, also those of groups that
    did not train; 0: none."""
    texts_mb: int = Field(8, ge=1)
    """Most MB of frames of one step whose text is kept: up to this much of the groups that did not train, which the
    buffer holds until the next checkpoint, and as much of the batch."""
    warn_cooldown_steps: int = Field(20, ge=0)
    """After a line in the log about one subset, the next one about it comes this many steps later at the earliest."""
