"""All responses of a request in one call of the engine."""

from __future__ import annotations

from bapo.config.tree import Config
from bapo.core.types import RolloutRequest
from rollout_server.rollouts.base import Rollout, completion_of, sampled
from rollout_server.sampler import Sampler
from rollout_server.tokenization import Tokenization


class Single:
    """A `RolloutProgram` of one call."""

    def __init__(self, config: Config, tokenization: Tokenization, sampler: Sampler) -> None:
        self._config, self._tokenization, self._sampler = config, tokenization, sampler

    async def run(self, request: RolloutRequest) -> Rollout:
        """Sample."""
        prompt = self._tokenization.encode_prompt(request.prompt)
        found = await sampled(self._sampler, completion_of(request, prompt, self._config))
        return Rollout(request=request, prompt_token_ids=found.token_ids, sequences=found.sequences)
