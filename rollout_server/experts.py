"""Expert rows (LUFFY, ReLIFT): a reference solution appended to the sampled responses of a group.

    request of G rows --to_sample--> G - 1 responses from the engine --joined--> G rows, graded together

The solution comes from a grading process, because a task's solver is user code and may hang; its tokens come from the
engine, so that the policy could have sampled them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from bapo.core.errors import GradingError
from bapo.core.token_arrays import Int32s
from bapo.core.types import Prompt, Purpose, RolloutRequest
from rollout_server.engines.base import SampledGroup


class NoExpertError(GradingError):
    """The task has no solution for this prompt."""

    reason = "no_expert"


class Experts:
    """Expert rows, with `algorithm.num_experts` = 1: one per group, none in evaluations."""

    def __init__(self, *, solution: Callable[[Prompt], str | None], encode: Callable[[str], Int32s]) -> None:
        """
        Args:
            solution: text of the expert, or None. Raises: GradingError.
            encode: [L] token ids of a response, at least one.
        """
        self._solution, self._encode = solution, encode

    def to_sample(self, request: RolloutRequest) -> RolloutRequest:
        """The request to the engine: without the expert row."""
        return replace(request, group_size=request.group_size - _num_rows(request))

    def joined(self, sampled: SampledGroup, request: RolloutRequest) -> SampledGroup:
        """The group with the expert row appended. Raises: NoExpertError; GradingError."""
        if not _num_rows(request):
            return sampled
        text = self._solution(request.prompt)
        if text is None:
            raise NoExpertError(f"task {request.prompt.task!r} has no solution for prompt {request.prompt.prompt_id}")
        token_ids = self._encode(text)
        oldest = int(sampled.versions[:, 0].min())
        versions = [[oldest, oldest if sampled.spans is not None else int(sampled.versions[:, 1].max())]]
        return SampledGroup(
            request_id=sampled.request_id,
            prompt_token_ids=sampled.prompt_token_ids,
            token_ids=np.concatenate([sampled.token_ids, token_ids]),
            # Not sampled by a policy: LUFFY's pi_phi = 1.
            logprobs=np.concatenate([sampled.logprobs, np.zeros(len(token_ids), np.float32)]),
            lengths=np.append(sampled.lengths, np.int32(len(token_ids))),
            truncated=np.append(sampled.truncated, False),
            versions=np.concatenate([sampled.versions, np.array(versions, np.int32)]),
            texts=(*sampled.texts, text),
            num_experts=1,
            spans=_with_expert(sampled.spans, len(token_ids), oldest),
        )


def _num_rows(request: RolloutRequest) -> int:
    return 0 if request.purpose is Purpose.EVALUATE else 1


def _with_expert(spans: Int32s | None, num_tokens: int, version: int) -> Int32s | None:
    return None if spans is None else np.concatenate([spans, np.array([[num_tokens, version]], np.int32)])
