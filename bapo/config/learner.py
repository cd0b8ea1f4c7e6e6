"""Optimization, checkpoints and diagnostics."""

from __future__ import annotations

from typing import Annotated, Literal

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
    """After the warmup, over the steps of the run, as in transformers."""
    lr_final: float = Field(0.0, ge=0, le=1)
    """Rate after the last step of a decaying schedule, as a share of `lr`."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of AdamW."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW."""
    grad_clip: float = Field(1.0, gt=0)
    """Maximum L2 norm of the gradient."""
    minibatch_size: int | None = Field(64, ge=1)
    """Groups per optimizer step, in near-equal mini-batches. null: one step per batch."""
    epochs: int = Field(1, ge=1)
    """Passes over a batch."""
    epochs_until: int | None = Field(None, ge=1)
    """One pass after this step (T of ReMix); null: always `epochs`."""
    reset_optimizer: bool = False
    """Reset Adam's moments at the start of every step (Kimi k1.5)."""
    microbatch_tokens: int = Field(4096, ge=64)
    """Tokens of one forward and backward pass; does not change the loss."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Keep only the inputs of decoder layers and recompute the rest: less memory, a third more FLOPs, the same
    gradients. auto: on CUDA."""
    activation_gib: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """With it: GiB per rank that layers may keep. auto: what is free on the GPU after two steps; nothing after an
    out-of-memory error, or with several ranks."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile of decoder layers (needs a C++ compiler): faster after minutes of compilation. auto: on CUDA, with
    a compiler, in runs of more than 20 steps without LoRA."""
    logprob_chunk_tokens: int = Field(1024, ge=1)
    """Tokens whose logits exist at a time."""
    num_ranks: int = Field(1, ge=1)
    """Learner processes (FSDP2)."""
    shard_ranks: int | None = Field(None, ge=1)
    """Ranks that share one copy of weights, gradients and moments; others hold replicas (HSDP). Set it to the GPUs of a
    node; null: all."""
    collective_timeout_min: float = Field(10.0, gt=0, le=MAX_SECONDS / 60)
    """Minutes after which a collective of a pass (not a wait for batches, weights or checkpoints) fails because a rank
    is lost."""
    num_threads: int = Field(1, ge=1)
    """CPU threads per rank."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if available."""
    gpus: GpuIndices | None = None
    """GPUs of this machine, one per rank (torch device indices); null: the first `num_ranks` not in `rollout.gpus`."""
    batch_timeout_s: float = Field(600.0, gt=0, le=MAX_SECONDS)
    """Seconds without any group after which a waiting learner or evaluator stops; longer than the longest response."""
    port: int = Field(8702, ge=0, le=65535)
    """Health and metrics of rank 0."""


class CheckpointConfig(Frozen):
    """Checkpoints."""

    every: int = Field(10, ge=1)
    """Steps. A checkpoint has weights, optimizer, data position and buffer."""
    keep_last: int = Field(3, ge=1)
    """Older checkpoints are deleted, but not models exported from them."""
    keep_best: int = Field(0, ge=0)
    """Also keep this many checkpoints that measured best by `evaluation.best_measure`, written after each measured
    step."""
    background: bool = True
    """The learner waits only for the copy to host memory (12 bytes per parameter, over all ranks); false: for the disk,
    without a copy."""
    keep_batches: bool = True
    """Keep the batches after the oldest checkpoint (RUN/batches) for `bapo replay`: `every` x `keep_last` batches on
    disk."""


class DiagnosticsConfig(Frozen):
    """Off-policy diagnostics: drift of the policy from the behavior policies of its batch (docs/monitoring.md)."""

    every: int = Field(1, ge=0)
    """Steps between measurements; 0: never. No extra forward pass."""
    tv_warn: float = Field(0.05, gt=0, le=1)
    """Warn if the mean total variation per token of a subset or age exceeds this."""
    ess_warn: float = Field(0.5, ge=0, lt=1)
    """Warn if its effective sample size, as a share of its responses, is below this."""
    token_records: int = Field(0, ge=0)
    """Steps between records of text, entropy, ratio and clipping of every token of the batch; 0: never. No extra
    forward pass."""
    token_records_mb: int = Field(256, ge=1)
    """Most MB of texts and token records on disk (RUN/token_records); the oldest are deleted."""
    texts: int = Field(1, ge=0)
    """Steps between records of the texts of all responses, also of untrained groups; 0: never."""
    texts_mb: int = Field(8, ge=1)
    """Most MB of frames per step whose texts are recorded: of the batch, and as much of untrained groups, kept in the
    buffer until the next checkpoint."""


class SftConfig(Frozen):
    """Supervised fine-tuning: set by `bapo sft`, not by hand."""

    data: str = ""
    """JSONL file of conversations: `messages`, or `prompt` and `completion`."""
    epochs: int = Field(1, ge=1)
    """Passes over the data, each in an order of its own."""
