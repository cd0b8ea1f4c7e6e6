"""Partial rollouts (Kimi k1.5): responses are sampled in segments of `rollout.generation_budget` tokens.

    at most `budget` tokens of each response --> all have ended ------------------------------------> Rollout
                                              \'--> some have not: PAUSED, stored (segment_files.py)
    PAUSED --new weights, or nothing else to sample--> each open response continues for another budget --> repeat

A few long responses thus block neither their batch nor the engine: while a group is paused, others are sampled. Every
token keeps its log-prob and version. Only fresh groups have a budget: evaluations and re-evaluations are sampled with
the weights of one version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from bapo.config.tree import Config
from bapo.core.sequences import SampledSequence
from bapo.core.types import Outcome, Purpose, RolloutRequest
from rollout_server.engines.base import Completion
from rollout_server.rollouts.base import Rollout, completion_of, sampled
from rollout_server.rollouts.segment_files import SegmentFiles
from rollout_server.rollouts.single import Single
from rollout_server.sampler import Sampler
from rollout_server.tokenization import Tokenization

log = logging.getLogger(__name__)

IDLE_S = 0.5
"""An engine idle for this long has nothing else to sample: the maximum duration of a claim."""
POLL_S = 0.01
"""Between two looks at the engine while groups are paused."""


class Segmented:
    """A `RolloutProgram` that samples fresh groups in segments."""

    def __init__(
        self,
        config: Config,
        tokenization: Tokenization,
        sampler: Sampler,
        *,
        files: SegmentFiles,
        on_pause: Callable[[str, bool], None] = lambda request_id, paused: None,
    ) -> None:
        """`on_pause`: called when a group begins (True) or ends (False) to wait for its next budget."""
        assert config.rollout.generation_budget is not None
        self._config, self._tokenization, self._sampler = config, tokenization, sampler
        self._budget, self._limit = config.rollout.generation_budget, config.rollout.max_response_tokens
        self._files, self._on_pause = files, on_pause
        self._whole = Single(config, tokenization, sampler)
        self._paused: list[tuple[int, asyncio.Future[None]]] = []
        """Newest version of each paused group, and what lets it continue."""
        self._watching: asyncio.Future[None] | None = None

    async def run(self, request: RolloutRequest) -> Rollout:
        """Sample, or continue the stored segments of another worker."""
        if request.purpose is not Purpose.FRESH:
            return await self._whole.run(request)
        call = completion_of(request, self._tokenization.encode_prompt(request.prompt), self._config)
        rollout = self._stored(request)
        if rollout is None:
            first = await sampled(self._sampler, replace(call, max_tokens=min(self._budget, call.max_tokens)))
            rollout = Rollout(request=request, prompt_token_ids=first.token_ids, sequences=first.sequences)
            if self._unfinished(rollout):
                await self._pause(rollout)
        while self._unfinished(rollout):
            rollout = await self._continued(rollout, call)
            if self._unfinished(rollout):
                await self._pause(rollout)
            else:
                self._files.save(rollout)
        return rollout

    def _unfinished(self, rollout: Rollout) -> list[int]:
        return [
            i for i, found in enumerate(rollout.sequences) if found.truncated and len(found.token_ids) < self._limit
        ]

    def _stored(self, request: RolloutRequest) -> Rollout | None:
        """None also for segments of weights newer than the engine's: they are from before a rollback of the learner."""
        rollout = self._files.load(request)
        if rollout is None or rollout.newest_version > self._sampler.policy_version:
            return None
        num_open = len(self._unfinished(rollout))
        log.info("group %s resumed from stored segments: %d responses open", request.request_id, num_open)
        return rollout

    async def _continued(self, rollout: Rollout, call: Completion) -> Rollout:
        """The rollout with another segment of each unfinished response."""
        rows, sequences = self._unfinished(rollout), list(rollout.sequences)
        prompt, parts = rollout.prompt_token_ids.tolist(), []
        for row in rows:
            so_far = sequences[row].token_ids.tolist()
            part = replace(
                call,
                call_id=f"{call.call_id}#{row}",
                token_ids=[*prompt, *so_far],
                num=1,
                max_tokens=min(self._budget, self._limit - len(so_far)),
                seed=None,
            )
            parts.append(asyncio.ensure_future(sampled(self._sampler, part)))
        try:
            for row, found in zip(rows, await asyncio.gather(*parts), strict=True):
                sequences[row] = self._stopped(sequences[row].followed_by(found.sequences[0]), call.stop)
        finally:
            for begun in parts:  # if one of them is refused, the others are aborted
                begun.cancel()
        return replace(rollout, sequences=tuple(sequences))

    def _stopped(self, sequence: SampledSequence, stop: tuple[str, ...]) -> SampledSequence:
        """The sequence until a stop text that began in an earlier segment: the engine saw only the rest of it."""
        num_tokens = self._tokenization.num_until_stop(sequence.token_ids.tolist(), stop) if stop else None
        return sequence if num_tokens is None else replace(sequence.first(num_tokens), outcome=Outcome.GRADED)

    async def _pause(self, rollout: Rollout) -> None:
        """Store a rollout, and wait for new weights, or until the engine has nothing else to sample."""
        self._files.save(rollout)
        go_on = asyncio.get_running_loop().create_future()
        self._paused.append((rollout.newest_version, go_on))
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())
        self._on_pause(rollout.request.request_id, True)
        try:
            await go_on
        finally:
            self._on_pause(rollout.request.request_id, False)

    async def _watch(self) -> None:
        """Let paused groups continue, all at once when the engine is idle."""
        while self._paused:
            await asyncio.sleep(POLL_S)
            idle, version = self._sampler.idle_s >= IDLE_S, self._sampler.policy_version
            due = [go_on for paused_at, go_on in self._paused if idle or paused_at < version]
            self._paused = [paused for paused in self._paused if paused[1] not in due]
            for go_on in due:
                if not go_on.done():
                    go_on.set_result(None)
