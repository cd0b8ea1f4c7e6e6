"""How responses are sampled, and by how many workers."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from bapo.algorithms.settings import MAX_SECONDS, Frozen
from bapo.core.call_limits import MAX_REQUESTS


def _distinct_indices(indices: tuple[int, ...]) -> tuple[int, ...]:
    """Raises: ValueError."""
    if not indices or min(indices) < 0 or len(set(indices)) < len(indices):
        raise ValueError(f"{list(indices)}: write one or more different indices from 0 on, such as [0, 1], or null")
    return indices


GpuIndices = Annotated[tuple[int, ...], AfterValidator(_distinct_indices)]


class RolloutConfig(Frozen):
    """Sampling."""

    engine: str = "vllm"
    """A file of `rollout_server/engines`: `vllm`, or `scripted` (a test double)."""
    num_workers: int = Field(1, ge=1)
    """Engines at the start; `bapo scale RUN N` changes it during a run."""
    max_workers: int = Field(8, ge=1)
    """`bapo scale` refuses more."""
    max_response_tokens: int = Field(64, ge=1)
    """A response that reaches this length is truncated and graded as it stands."""
    max_prompt_tokens: int = Field(64, ge=1)
    """A longer prompt is refused before the run starts."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; rollout log-probs are those of the tempered distribution."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus; the importance ratios of eq. 3 need 1.0."""
    generation_budget: int | None = Field(None, ge=1)
    """Tokens that a fresh response gets from one policy version: then it waits, and continues with the next weights, or
    when there is nothing else to sample (partial rollouts). null: a response is sampled in one go."""
    max_groups_in_flight: int = Field(32, ge=1, le=4 * MAX_REQUESTS)
    """Groups that one worker samples at a time."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Keywords of the engine (vLLM: engine arguments)."""
    worker_resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Ray resources of one worker: `{ GPU = 1 }`, or names that `ray start --resources` gave; empty: one GPU where vLLM
    is its build for GPUs, else one CPU."""
    gpus: GpuIndices | None = None
    """GPUs of this machine that are the workers', as torch numbers what it sees; null: all that the learner leaves.
    Where it shares one with the learner, `engine_options` must have gpu_memory_utilization (docs/cluster.md)."""
    weights_cache: str | None = None
    """Where a host that cannot read the learner's weight files keeps copies; null: with its temporary files."""
    host: str = "127.0.0.1"
    """Address that the control API listens on, unless BAPO_HOST says otherwise. Workers on other hosts fetch weights
    from there (docs/cluster.md)."""
    port: int = Field(8710, ge=0, le=65535)
    """Control API of the fleet; 0 takes a free port."""
    sync_timeout_s: float = Field(120.0, gt=0, le=MAX_SECONDS)
    """A worker that has not taken new weights after this is replaced."""
    start_timeout_s: float = Field(300.0, gt=0, le=MAX_SECONDS)
    """A worker that is not ready after this fails the run."""
    drain_s: float = Field(30.0, ge=0, le=MAX_SECONDS)
    """A worker that is scaled away may finish its groups for this long; unfinished ones then return to the queue."""

    @model_validator(mode="after")
    def workers_fit(self) -> Self:
        if self.num_workers > self.max_workers:
            raise ValueError(
                f"num_workers = {self.num_workers} is more than max_workers = {self.max_workers}; "
                f"write max_workers = {self.num_workers}, or fewer workers"
            )
        if self.top_p < 1:
            raise ValueError(
                f"top_p = {self.top_p}: the learner's log-probs are over the whole vocabulary, so the importance "
                "ratios of eq. 3 would be wrong; write top_p = 1.0"
            )
        return self
