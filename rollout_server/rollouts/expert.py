"""Expert responses (LUFFY, ReLIFT): a reference solution after the sampled responses of a group.

    request of G responses --> G - 1 of another program, then the solution: graded together

The solution comes from a grading process, because a task's solver is user code and may hang; its tokens come from the
model's tokenizer, so that the policy could have sampled them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from bapo.core.errors import GradingError
from bapo.core.sequences import SampledSequence
from bapo.core.types import PER_TOKEN, Outcome, Prompt, Purpose, RolloutRequest
from rollout_server.rollouts.base import Rollout, RolloutProgram
from rollout_server.tokenization import Tokenization


class NoExpertError(GradingError):
    """The task has no solution for this prompt."""

    reason = "no_expert"


class WithExpert:
    """A `RolloutProgram` with `algorithm.num_experts` = 1: one per group, none in evaluations."""

    def __init__(
        self, program: RolloutProgram, tokenization: Tokenization, solution: Callable[[Prompt], str | None]
    ) -> None:
        """
        Args:
            program: samples the other responses.
            solution: text of the expert, or None; may block. Raises: GradingError.
        """
        self._program, self._tokenization, self._solution = program, tokenization, solution

    async def run(self, request: RolloutRequest) -> Rollout:
        """Raises: as of the program; NoExpertError; GradingError."""
        if request.purpose is Purpose.EVALUATE:
            return await self._program.run(request)
        rollout = await self._program.run(msgspec.structs.replace(request, group_size=request.group_size - 1))
        text = await asyncio.to_thread(self._solution, request.prompt)
        if text is None:
            raise NoExpertError(f"task {request.prompt.task!r} has no solution for prompt {request.prompt.prompt_id}")
        oldest = min(int(sequence.versions.min()) for sequence in rollout.sequences)
        return replace(rollout, request=request, sequences=(*rollout.sequences, self._sequence(text, oldest)))

    def _sequence(self, text: str, version: int) -> SampledSequence:
        try:
            token_ids = self._tokenization.encode_response(text)
        except Exception as error:  # tokenizers raise anything; this group fails alone
            raise NoExpertError(f"the expert's text has no tokens: {type(error).__name__}: {error}") from error
        # Not sampled by a policy, so every other column is 0, as LUFFY's log pi_phi.
        columns: dict[str, Any] = {name: np.zeros(len(token_ids), kind) for name, kind in PER_TOKEN.items()}
        return SampledSequence(
            **columns | {"token_ids": token_ids},
            versions=np.full(len(token_ids), version, np.int32),
            outcome=Outcome.EXPERT,
            text=text,
        )
