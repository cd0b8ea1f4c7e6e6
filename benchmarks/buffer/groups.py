"""The groups that are moved: 8 responses, int32 ids below 151,936 and float32 log-probs, as large as the names say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bapo.core.codec import pack_group
from bapo.core.types import Group, Progress, Prompt, Purpose, RolloutRequest, Timing
from bapo.transport.buffer_client import BufferClient

GROUP_SIZE = 8
VOCABULARY = 151_936
NUM_PROMPT_TOKENS = 60
ENQUEUE_AT_ONCE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One size of groups, and how many of them a round moves."""

    name: str
    tokens: int
    """Per response."""
    many: int
    """Groups of a round of pushes with several per call, and of its pulls."""
    single: int
    """Groups of a round of pushes with one per request."""
    per_call: int = 16


SIZES = (
    Size(name="20K", tokens=295, many=2048, single=512),
    Size(name="100K", tokens=1540, many=1024, single=512),
    Size(name="500K", tokens=7600, many=256, single=128),
)


class GroupMaker:
    """Frames of one size whose groups differ in their ids alone."""

    def __init__(self, tokens: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self._lengths = np.full(GROUP_SIZE, tokens, dtype=np.int32)
        total = tokens * GROUP_SIZE
        self._prompt_ids = rng.integers(0, VOCABULARY, NUM_PROMPT_TOKENS, dtype=np.int32)
        self._ids = rng.integers(0, VOCABULARY, total, dtype=np.int32)
        self._logprobs = -rng.exponential(0.5, total).astype(np.float32)

    def frames(self, requests: Sequence[RolloutRequest]) -> list[bytes]:
        """One frame per request, 2 right answers of 8: inside BAPO's filter and its window of B_high."""
        rewards = np.zeros(GROUP_SIZE, dtype=np.float32)
        rewards[:2] = 1.0
        return [
            pack_group(
                Group(
                    group_id=request.request_id,
                    prompt=request.prompt,
                    purpose=request.purpose,
                    step=request.step,
                    label=request.label,
                    worker_id="bench",
                    prompt_token_ids=self._prompt_ids,
                    token_ids=self._ids,
                    rollout_logprobs=self._logprobs,
                    lengths=self._lengths,
                    rewards=rewards,
                    outcomes=np.zeros(GROUP_SIZE, dtype=np.uint8),
                    versions=np.full((GROUP_SIZE, 2), request.step - 1, dtype=np.int32),
                    timing=Timing(claimed_at=1_700_000_000.0, sample_s=0.5, grade_s=0.1),
                )
            )
            for request in requests
        ]


def requests_for(first: int, number: int, step: int, batch_size: int) -> list[RolloutRequest]:
    """Fresh requests number `first`, ...; `step` is the first step that they are planned for."""
    return [
        RolloutRequest(
            request_id=f"g{index:08d}",
            prompt=Prompt(
                prompt_id=f"p{index:08d}",
                text="1,2,3->6:",
                task="countdown",
                answer={"numbers": [1, 2, 3], "target": 6},
            ),
            group_size=GROUP_SIZE,
            purpose=Purpose.FRESH,
            step=step + (index - first) // batch_size,
            min_version=0,
        )
        for index in range(first, first + number)
    ]


def ask_for(client: BufferClient, requests: Sequence[RolloutRequest]) -> None:
    """Report the newest version that their groups will have, and enqueue them."""
    last = max(request.step for request in requests)
    client.report_progress(Progress(step=max(0, last - 1), policy_version=last))
    for first in range(0, len(requests), ENQUEUE_AT_ONCE):
        client.enqueue(requests[first : first + ENQUEUE_AT_ONCE])
