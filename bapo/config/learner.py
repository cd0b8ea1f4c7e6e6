"""Optimization, checkpoints and diagnostics."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bapo.algorithms.settings import MAX_SECONDS, Frozen
from bapo.config.rollout import GpuIndices


class LearnerConfig(Frozen):
    """Optimization."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(10, ge=0)
    """Learner steps of linear warmup."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warmup, over the steps of the run, as in transformers."""
    lr_final: float = Field(0.0, ge=0, le=1)
    """Learning rate after the last step as a fraction of `lr`, for decaying schedules."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of AdamW."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW."""
    grad_clip: float = Field(1.0, gt=0)
    """Maximum L2 norm of the gradient."""
    minibatch_size: int | None = Field(64, ge=1)
    """Groups per optimizer step; a batch is split into near-equal mini-batches (docs/paper.md, Decisions). null: one
    optimizer step per batch."""
    epochs: int = Field(1, ge=1)
    """Passes over one batch."""
    epochs_until: int | None = Field(None, ge=1)
    """After this step one pass per batch is made (T of ReMix); null: always `epochs`."""
    reset_optimizer: bool = False
    """Reset Adam's moments at the start of every step (Kimi k1.5)."""
    microbatch_tokens: int = Field(4096, ge=64)
    """Token budget of one forward and backward pass; does not change the loss."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Keep only the input of each decoder layer and recompute the rest in the backward pass: less memory for a third
    more FLOPs, with identical loss and gradients. auto: on CUDA, not on the CPU."""
    activation_gib: float = Field(0.0, ge=0)
    """With gradient_checkpointing: GiB of activations per rank that layers may keep for the backward pass. As many
    layers of a micro-batch as fit keep theirs and are not recomputed; set it to the memory that is free at the peak."""
    compile: bool = False
    """Compile decoder layers with torch.compile (needs a C++ compiler): fewer passes over memory between matrix
    products, after minutes of compilation at the start."""
    logprob_chunk_tokens: int = Field(1024, ge=1)
    """Number of tokens whose logits are materialized at a time."""
    num_ranks: int = Field(1, ge=1)
    """Learner processes (FSDP2)."""
    shard_ranks: int | None = Field(None, ge=1)
    """Ranks that shard one copy of weights, gradients and moments; further ranks hold replicas (HSDP). With the number
    of GPUs of a node, only gradients of shards travel between nodes; null: all ranks."""
    collective_timeout_min: float = Field(10.0, gt=0, le=MAX_SECONDS / 60)
    """Minutes after which a collective of a pass fails because a rank is lost. Waits for a batch, for weights or for a
    checkpoint do not count."""
    num_threads: int = Field(1, ge=1)
    """CPU threads per rank."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if available."""
    gpus: GpuIndices | None = None
    """GPUs of this machine for the learner, one per rank, as torch device indices; null: the first `num_ranks` that are
    not in `rollout.gpus` (docs/cluster.md)."""
    batch_timeout_s: float = Field(600.0, gt=0, le=MAX_SECONDS)
    """Seconds without progress after which a waiting learner or evaluator stops with the reason: no group of any
    purpose has arrived for this long. Must exceed the time of the longest response."""
    port: int = Field(8702, ge=0, le=65535)
    """Port of health and metrics of rank 0; 0: a free port."""


class CheckpointConfig(Frozen):
    """Checkpoints."""

    every: int = Field(10, ge=1)
    """Steps between checkpoints. A checkpoint contains weights, optimizer, data position and buffer."""
    keep_last: int = Field(3, ge=1)
    """Number of checkpoints to keep; older ones are deleted."""
    background: bool = True
    """Write a checkpoint while the next steps train. The learner waits only until weights and moments are copied to
    host memory (12 bytes per parameter, over all ranks); false: until they are on the disk, without the copy."""
    keep_batches: bool = True
    """Keep the batches after the oldest checkpoint (RUN/batches), so that `bapo replay` can replay a step. Needs disk
    space for `every` x `keep_last` batches."""


class DiagnosticsConfig(Frozen):
    """Off-policy diagnostics: drift of the policy from the behavior policies of its batch (docs/monitoring.md)."""

    every: int = Field(1, ge=0)
    """Steps between measurements; 0: never. They need no extra forward pass."""
    tv_warn: float = Field(0.05, gt=0, le=1)
    """Warn if the mean total variation per token of a subset or age exceeds this."""
    ess_warn: float = Field(0.5, ge=0, lt=1)
    """Warn if the effective sample size of a subset or age, as a share of its responses, is below this."""
    token_records: int = Field(0, ge=0)
    """Steps between token records: text, entropy, ratio and clipping of every token of the batch, shown on the run's
    page (docs/monitoring.md); 0: never. They need no extra forward pass."""
    token_records_mb: int = Field(256, ge=1)
    """Maximum MB of texts and token records on disk (RUN/token_records); the oldest are deleted."""
    texts: int = Field(1, ge=0)
    """Steps between recording the texts of all responses for the run's page, including groups that did not train; 0:
    never."""
    texts_mb: int = Field(8, ge=1)
    """Maximum MB of frames per step whose texts are recorded: this much of the groups that did not train, which the
    buffer retains until the next checkpoint, and this much of the batch."""
