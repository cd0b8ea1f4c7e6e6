"""How one request becomes G responses: rollout programs, between the worker and its engine.

    worker --RolloutRequest--> runner.py: program.run --Completion--> sampler.py (the engine's thread)
    delivery.py <--Rollout---                         <--Completed--

single.py: one call of G responses. segmented.py: in segments. expert.py: an expert's response after the sampled ones.
taught.py: a teacher's log-probs of the sampled tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from bapo.config.tree import Config
from bapo.core.reward_details import Details
from bapo.core.sequences import SampledSequence, group_columns
from bapo.core.token_arrays import Float32s, Int32s
from bapo.core.types import Group, RolloutRequest, Timing
from rollout_server.engines.base import Completed, Completion, seed_of
from rollout_server.sampler import Sampler
from rollout_server.tokenization import EncodedPrompt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """Responses to one request: a `Group` before it has rewards."""

    request: RolloutRequest
    prompt_token_ids: Int32s
    """[P] as the engine saw them."""
    sequences: tuple[SampledSequence, ...]
    """G responses."""
    rewards: tuple[float, ...] | None = None
    """[G] in [0, 1], of those that have one already, else NaN; None: all are graded from their texts."""
    facts: Details = field(default_factory=dict)
    """[G] each, what agents reported besides (`bapo.core.reward_details`)."""

    @property
    def newest_version(self) -> int:
        """Newest version of any token."""
        return max(int(sequence.versions.max()) for sequence in self.sequences)

    def group(self, rewards: Float32s, *, worker_id: str, timing: Timing, details: Details | None = None) -> Group:
        """The group that the buffer stores. Raises: ContractError when its columns contradict each other."""
        request = self.request
        return Group(
            group_id=request.request_id,
            prompt=request.prompt,
            purpose=request.purpose,
            step=request.step,
            label=request.label,
            worker_id=worker_id,
            prompt_token_ids=self.prompt_token_ids,
            rewards=rewards,
            reward_details=details or {},
            timing=timing,
            **group_columns(self.sequences),
        )


class RolloutProgram(Protocol):
    """Makes the responses of a request. Its coroutines run in one event loop; one may be cancelled."""

    async def run(self, request: RolloutRequest) -> Rollout:
        """Raises: ContractError for a request that cannot be sampled; GradingError; UnavailableError without engine."""
        ...


def completion_of(request: RolloutRequest, prompt: EncodedPrompt, config: Config) -> Completion:
    """The call that samples all responses of a request."""
    sampling, most = config.rollout.sampling(request), config.rollout.max_response_tokens
    return Completion(
        call_id=request.request_id,
        token_ids=prompt.token_ids,
        num=request.group_size,
        max_tokens=min(sampling.pop("max_response_tokens"), most),
        seed=seed_of(config.run.seed, request.request_id) if config.run.deterministic else None,
        images=prompt.images,
        context=request,
        **sampling,
    )


async def sampled(sampler: Sampler, completion: Completion) -> Completed:
    """The result of a call, which is aborted when its coroutine is cancelled."""
    return await asyncio.wrap_future(sampler.generate(completion))
