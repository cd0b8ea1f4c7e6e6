"""Sampling and rollout workers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from bapo.algorithms.settings import MAX_SECONDS, Frozen
from bapo.core.addresses import bare_host
from bapo.core.call_limits import MAX_REQUESTS


def _distinct_indices(indices: tuple[int, ...]) -> tuple[int, ...]:
    """Raises: ValueError."""
    if not indices or min(indices) < 0 or len(set(indices)) < len(indices):
        raise ValueError(f"{list(indices)}: must be distinct indices >= 0, such as [0, 1], or null")
    return indices


GpuIndices = Annotated[tuple[int, ...], AfterValidator(_distinct_indices)]


class RolloutConfig(Frozen):
    """Sampling."""

    engine: str = "vllm"
    """A file of `rollout_server/engines`: `vllm`, or `scripted` (a test double)."""
    num_workers: int = Field(1, ge=1)
    """Initial number of workers; `bapo scale RUN N` changes it during a run."""
    max_workers: int = Field(8, ge=1)
    """Upper limit of `bapo scale`."""
    max_response_tokens: int = Field(64, ge=1)
    """Maximum response length; longer responses are truncated and graded as they are."""
    max_prompt_tokens: int = Field(64, ge=1)
    """Maximum prompt length, checked before the run starts."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature, 0.01 to 2 in vLLM; rollout log-probs are those of the tempered distribution."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; the importance ratios of eq. 3 require 1.0."""
    generation_budget: int | None = Field(None, ge=1)
    """Partial rollouts: tokens of a fresh response sampled by one policy version; then it pauses, and resumes with the
    next weights, or when there is nothing else to sample. null: off."""
    max_groups_in_flight: int = Field(32, ge=1, le=4 * MAX_REQUESTS)
    """Groups that a worker samples concurrently."""
    kv_cache_at_update: Literal["recompute", "keep"] = "recompute"
    """KV cache of responses in flight after a weight update. recompute: with the new weights, so that the rest of a
    response is sampled as the policy would. keep: nothing is computed again, and the rest is sampled with new weights
    and old keys and values. New prompts never use old blocks, and log-probs are those of sampling in both."""
    update_wait_s: float = Field(2.0, ge=0, le=MAX_SECONDS)
    """Seconds that new weights wait for the responses in flight, which then end with the weights that began them, and
    whose KV cache is not computed again; new requests wait too. Only with `cadence.max_steps_ahead` >= 1 and
    without `cadence.wait_for_reevaluation`, where no step needs the new weights at once, for weights that travel as
    files, and without a `generation_budget`. 0: no wait."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Engine arguments (vLLM: EngineArgs)."""
    worker_resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Ray resources of one worker: `{ GPU = 1 }`, or custom resources of `ray start --resources`; empty: one GPU for
    the CUDA build of vLLM, else one CPU."""
    gpus: GpuIndices | None = None
    """GPUs of this machine for the workers, as torch device indices; null: all that the learner does not use. To share
    one with the learner, set gpu_memory_utilization in `engine_options` (docs/cluster.md)."""
    weights_cache: str | None = None
    """Cache folder for weight files on hosts that cannot read the learner's; null: the temporary directory."""
    host: Annotated[str, AfterValidator(bare_host)] = "127.0.0.1"
    """Address of the control API; overridden by BAPO_HOST. Workers on other hosts download weights from it
    (docs/cluster.md)."""
    port: int = Field(8710, ge=0, le=65535)
    """Port of the control API; 0: a free port."""
    weight_transfer: Literal["auto", "nccl", "ipc", "file"] = "auto"
    """How workers get new weights. nccl: broadcast from GPU to GPU; ipc: read on the GPU that they share with a learner
    of one rank; file: read from RUN/weights, or over HTTP. After a failure, and for workers that have just started:
    file. auto: file without a CUDA learner, ipc or file if workers may share its GPUs, else nccl."""
    sync_timeout_s: float = Field(120.0, gt=0, le=MAX_SECONDS)
    """Seconds after which a worker that has not loaded new weights is restarted."""
    start_timeout_s: float = Field(300.0, gt=0, le=MAX_SECONDS)
    """Seconds after which a worker that is not ready fails the run."""
    engine_step_timeout_s: float = Field(120.0, gt=0, le=MAX_SECONDS)
    """Seconds that a step of an engine may take; then its worker is restarted."""
    drain_s: float = Field(30.0, ge=0, le=MAX_SECONDS)
    """Seconds that a worker may finish its groups when scaled down; unfinished ones return to the queue."""

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and its longest response together."""
        return self.max_prompt_tokens + self.max_response_tokens

    @model_validator(mode="after")
    def workers_fit(self) -> Self:
        if self.num_workers > self.max_workers:
            raise ValueError(
                f"num_workers = {self.num_workers} is more than max_workers = {self.max_workers}; "
                f"set max_workers = {self.num_workers}, or use fewer workers"
            )
        if self.top_p < 1:
            raise ValueError(
                f"top_p = {self.top_p}: the learner's log-probs are over the whole vocabulary, so the importance "
                "ratios of eq. 3 would be wrong; set top_p = 1.0"
            )
        if self.engine_options.get("enable_sleep_mode"):
            raise ValueError(
                "engine_options.enable_sleep_mode: learner and engines work at the same time, so nothing puts an "
                "engine to sleep; to share a GPU, limit it with gpu_memory_utilization and kv_cache_memory_bytes"
            )
        return self
