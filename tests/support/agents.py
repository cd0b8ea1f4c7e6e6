"""Doubles for episodes: a journal in memory that can fail, engines that answer what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bapo.config.agents import AgentsConfig
from bapo.core.errors import UnavailableError
from bapo.core.sequences import SampledSequence
from bapo.core.types import Outcome, RolloutRequest
from rollout_server.engines.base import Completed, Completion
from rollout_server.episodes.episode import Sampled, sampled_turn
from rollout_server.episodes.history import text_mark
from rollout_server.episodes.manager import Episodes, LeaseLostError, OpenGroup


class MemoryJournal:
    """What a front sees of the buffer's journal. `gate` holds appends back; `fail_after` loses the answer of one."""

    def __init__(self) -> None:
        self.entries: dict[str, list[bytes]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails = 0
        self.loses_answers = 0
        self.is_lost = False

    async def read(self, request_id: str) -> list[bytes]:
        return list(self.entries.get(request_id, []))

    async def append(self, request_id: str, number: int, entries: Sequence[bytes]) -> None:
        await self.gate.wait()
        if self.is_lost:
            raise LeaseLostError("it is another's")
        if self.fails:
            self.fails -= 1
            raise UnavailableError("Redis is down")
        found = self.entries.setdefault(request_id, [])
        if len(found) != number:
            raise UnavailableError(f"{len(found)} entries, not {number}")
        found += entries
        if self.loses_answers:
            self.loses_answers -= 1
            raise UnavailableError("the answer was lost")


class Front:
    """Episodes over a memory journal, with what they deliver and refuse."""

    def __init__(self, journal: MemoryJournal | None = None, **settings: Any) -> None:
        self.journal = journal or MemoryJournal()
        self.delivered: list[OpenGroup] = []
        self.refused: list[tuple[str, str]] = []
        self.details: list[str] = []
        self.counted: list[str] = []
        self.lost: list[str] = []
        self.clock = 0.0
        self.episodes = Episodes(
            AgentsConfig(**settings),
            self.journal,
            deliver=self.delivered.append,
            refuse=self._refuse,
            lost=lambda request: self.lost.append(request.request_id),
            count=self.counted.append,
            now=lambda: self.clock,
        )

    def _refuse(self, request: RolloutRequest, reason: str, detail: str) -> None:
        self.refused.append((request.request_id, reason))
        self.details.append(detail)


class ToldEngines:
    """Answers every call with the tokens, versions and log-probs that `answer` returns."""

    def __init__(self, answer: Callable[[Completion], tuple[list[int], list[int]]]) -> None:
        self._answer = answer
        self.calls: list[Completion] = []

    async def generate(self, completion: Completion, **options: Any) -> Completed:
        self.calls.append(completion)
        ids, versions = self._answer(completion)
        sequence = sequence_of(ids, versions)
        return Completed(
            call_id=completion.call_id, token_ids=np.array(completion.token_ids, np.int32), sequences=(sequence,)
        )


def sequence_of(ids: Sequence[int], versions: Sequence[int]) -> SampledSequence:
    return SampledSequence(
        token_ids=np.array(ids, np.int32),
        rollout_logprobs=-np.array(ids, np.float32) / 100,
        versions=np.array(versions, np.int32),
        outcome=Outcome.GRADED,
    )


def turn(
    index: int = 0,
    ids: Sequence[int] = (5, 6),
    *,
    call: str = "call",
    parent: int = -2,
    context: Sequence[int] = (1, 2),
    text: str = "text",
    version: int = 1,
) -> Sampled:
    """A turn written by hand."""
    return sampled_turn(
        index,
        sequence_of(ids, [version] * len(ids)),
        call=call,
        parent=parent,
        context_ids=list(context),
        mark=text_mark(text),
    )


async def ended(front: Front, request: RolloutRequest, rewards: Sequence[float]) -> None:
    """Adopt a request, and end its episodes with these rewards after one turn each."""
    await front.episodes.adopt(request)
    for handle, reward in zip(await front.episodes.open(len(rewards), 0.0), rewards, strict=True):
        await front.episodes.record(handle, turn(handle.episode.index))
        await front.episodes.reward(handle.key, reward)
