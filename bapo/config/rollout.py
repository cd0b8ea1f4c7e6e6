"""Sampling and rollout workers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from bapo.algorithms.settings import MAX_SECONDS, Frozen
from bapo.core.addresses import bare_host
from bapo.core.call_limits import MAX_REQUESTS
from bapo.core.types import SAMPLING, Sampling


def _distinct_indices(indices: tuple[int, ...]) -> tuple[int, ...]:
    """Raises: ValueError."""
    if not indices or min(indices) < 0 or len(set(indices)) < len(indices):
        raise ValueError(f"{list(indices)}: must be distinct indices >= 0, such as [0, 1], or null")
    return indices


GpuIndices = Annotated[tuple[int, ...], AfterValidator(_distinct_indices)]
StopTexts = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
]


class SamplingConfig(Frozen):
    """How held-out responses are sampled; null: as for all splits, for these as `rollout` says, or without it."""

    temperature: float | None = Field(None, gt=0)
    """Of sampling; greedy is `top_k = 1`."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus."""
    top_k: int | None = Field(None, ge=0)
    """Only the k most likely tokens; 0: all."""
    min_p: float | None = Field(None, ge=0, le=1)
    """Only tokens with at least this share of the probability of the most likely one; 0: all."""
    min_tokens: int | None = Field(None, ge=0)
    """No end before this many tokens."""
    max_response_tokens: int | None = Field(None, ge=1)
    """At most `rollout.max_response_tokens`."""
    repetition_penalty: float | None = Field(None, gt=0)
    """Divides positive logits of tokens in prompt and response, multiplies negative ones; 1: off."""
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    """Subtracted from the logits of tokens in the response; 0: off."""
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    """The same for each occurrence; 0: off."""
    stop: StopTexts | None = None
    """As `rollout.stop`."""

    def over(self, others: SamplingConfig) -> dict[str, Any]:
        """Sampling value -> this one's, else the other's."""
        own = ((name, getattr(self, name)) for name in SAMPLING)
        return {name: getattr(others, name) if value is None else value for name, value in own}


class RolloutConfig(Frozen):
    """Sampling."""

    engine: str = "vllm"
    """`vllm`, or `scripted` (a test double)."""
    num_workers: int = Field(1, ge=1)
    """Workers at the start; `bapo scale RUN N` changes it until the run is started again."""
    max_workers: int = Field(8, ge=1)
    """Limit of `bapo scale`."""
    max_response_tokens: int = Field(64, ge=1)
    """Longer responses are truncated and graded as they are."""
    max_prompt_tokens: int = Field(64, ge=1)
    """Longer prompts are refused before the run starts."""
    temperature: float = Field(1.0, gt=0)
    """0.01 to 2 in vLLM; rollout log-probs are those of the tempered distribution."""
    top_p: float = Field(1.0, gt=0, le=1)
    """The importance ratios of eq. 3 require 1.0."""
    stop: StopTexts = ()
    """Texts that end a response, which keeps them: `["</answer>"]`. It is graded with them, and is not truncated."""
    generation_budget: int | None = Field(None, ge=1)
    """Partial rollouts: tokens of a fresh response per policy version; the rest follows with the next weights, or when
    nothing else is to be sampled. null: off."""
    stale_tokens: Literal["drop", "mask"] = "drop"
    """Groups of episodes with a token older than `cadence` allows: dropped and sampled again, or trained without those
    tokens, which become context (docs/agents.md)."""
    max_groups_in_flight: int = Field(32, ge=1, le=4 * MAX_REQUESTS)
    """Groups that a worker samples at a time; of agents, groups per worker whose episodes are open."""
    kv_cache_at_update: Literal["recompute", "keep"] = "recompute"
    """KV cache of responses in flight at a weight update: computed again, or kept, so that the rest is sampled with new
    weights and old keys and values. New prompts never use old blocks."""
    update_wait_s: float = Field(2.0, ge=0, le=MAX_SECONDS)
    """Seconds that new weights wait for responses in flight, and new requests for them (docs/cluster.md); 0: none. Only
    with `cadence.max_steps_ahead` >= 1, without `wait_for_reevaluation` and `generation_budget`, for weights as
    files."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """vLLM's EngineArgs."""
    worker_resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Ray resources of a worker, such as `{ GPU = 1 }`; empty: one GPU for vLLM's CUDA build, else one CPU."""
    gpus: GpuIndices | None = None
    """GPUs of this machine for the workers (torch device indices); null: those that the learner does not use."""
    weights_cache: str | None = None
    """Folder for weights on hosts that cannot read the learner's; null: the temporary directory."""
    host: Annotated[str, AfterValidator(bare_host)] = "127.0.0.1"
    """Of the control API, from which other hosts download weights; overridden by BAPO_HOST."""
    port: int = Field(8710, ge=0, le=65535)
    """Of the control API."""
    weight_transfer: Literal["auto", "nccl", "ipc", "file"] = "auto"
    """nccl: from GPU to GPU; ipc: on the GPU shared with a learner of one rank; file: RUN/weights or HTTP, also after a
    failure and for new workers. auto: file without a CUDA learner, ipc or file if workers may share its GPUs, else
    nccl."""
    sync_timeout_s: float = Field(120.0, gt=0, le=MAX_SECONDS)
    """Seconds after which a worker without the new weights is restarted."""
    start_timeout_s: float = Field(300.0, gt=0, le=MAX_SECONDS)
    """Seconds after which a worker that is not ready ends the run."""
    engine_step_timeout_s: float = Field(120.0, gt=0, le=MAX_SECONDS)
    """Seconds of one engine step after which its worker is restarted."""
    drain_s: float = Field(30.0, ge=0, le=MAX_SECONDS)
    """Seconds for a worker's groups when scaled down; unfinished ones return to the queue."""

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and its longest response together."""
        return self.max_prompt_tokens + self.max_response_tokens

    def sampling(self, asked: Sampling | SamplingConfig) -> dict[str, Any]:
        """Sampling value -> what a request or an evaluation asks for, else the run's; without those that are off."""
        own = ((name, getattr(asked, name)) for name in SAMPLING)
        found = {name: getattr(self, name, None) if value is None else value for name, value in own}
        return {name: value for name, value in found.items() if value not in (None, ())}

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
                "ratios of eq. 3 would be wrong; set top_p = 1.0 (evaluation.top_p may be lower)"
            )
        if self.engine_options.get("enable_sleep_mode"):
            raise ValueError(
                "engine_options.enable_sleep_mode: learner and engines work at the same time, so nothing puts an "
                "engine to sleep; to share a GPU, limit it with gpu_memory_utilization and kv_cache_memory_bytes"
            )
        return self
