"""One call of a model by an agent: what the engine gets, and the record before the reply.

The client's sampling parameters have no effect: temperature and nucleus are those of the run, or of the evaluation, as
for every other response. Its `max_tokens` and `stop` end a reply earlier; one that they end is not a truncated
response, which the run's limits make. Recorded is what the engine saw and sampled, whatever the endpoint makes of it
afterwards.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bapo.config.tree import Config
from bapo.core.errors import LimitError
from bapo.core.token_arrays import Float32s, Int32s
from rollout_server.engines.base import Completion
from rollout_server.episodes.engine_calls import EngineCalls
from rollout_server.episodes.episode import Sampled, sampled_turn
from rollout_server.episodes.history import Continuation, continuation_of, text_mark
from rollout_server.episodes.manager import Episodes, Handle

NO_MARK = (0, b"")
"""Of a turn without text, whose client sends ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """What a client asks for."""

    key: str
    digest: str
    """Of its request."""
    is_retry: bool = False
    """Whether the client says that it is a retry, because a reply was lost."""
    text: str | None
    """The rendered prompt; None: it sent ids."""
    token_ids: Sequence[int]
    """What the server made of the prompt."""
    max_tokens: int
    """The smaller one of the client's limit and what vLLM gives a call with these tokens."""
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reply:
    """What was sampled."""

    prompt_token_ids: list[int]
    token_ids: Int32s
    logprobs: Float32s
    truncated: bool


class Recorder:
    """Used in one event loop."""

    def __init__(
        self,
        config: Config,
        episodes: Episodes,
        engines: EngineCalls,
        *,
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
        took: Callable[[str, float], None] = lambda phase, seconds: None,
    ) -> None:
        """
        Args:
            encode, decode: of the model's tokenizer, without adding and with all special tokens.
            took: called with the seconds of each phase of a call: engine, journal.
        """
        assert config.agents is not None
        self._config, self._settings = config, config.agents
        self._episodes, self._engines = episodes, engines
        self._encode, self._decode, self._took = encode, decode, took

    async def sample(self, call: ModelCall) -> Reply:
        """Sample, record, then reply. A retry of a call that is recorded gets its reply again.

        Raises: GoneError; LimitError; ContractError for what the engine refuses; UnavailableError.
        """
        handle = self._episodes.handle_of(call.key)
        if call.is_retry and (turn := await self._recorded(handle, call)) is not None:
            return _reply(handle.episode.path_of(turn.parent) + turn.context_ids.tolist(), turn)
        handle.num_calls += 1
        handle.calling[call.digest] = done = asyncio.Event()
        try:
            return await self._sampled(handle, call)
        finally:
            handle.num_calls -= 1
            handle.heard = self._episodes.now()
            done.set()
            if handle.calling.get(call.digest) is done:
                del handle.calling[call.digest]

    async def _recorded(self, handle: Handle, call: ModelCall) -> Sampled | None:
        """The turn of the first try, which may be under way, or being stored although its client has gone."""
        while (first := handle.calling.get(call.digest)) is not None:
            await first.wait()
        async with handle.group.lock:
            return handle.episode.turn_of_call(call.digest)

    async def _sampled(self, handle: Handle, call: ModelCall) -> Reply:
        found = continuation_of(handle.episode, call.text, call.token_ids, self._encode)
        limit = self._limit(handle, found)
        unlimited = min(limit, self._config.rollout.longest_sequence - len(call.token_ids))
        max_tokens, has_own_limit = min(limit, call.max_tokens), call.max_tokens < unlimited
        reserved = len(found.context_ids) + max_tokens
        handle.num_reserved += reserved
        try:
            return await self._completed(handle, call, found, max_tokens, has_own_limit=has_own_limit)
        finally:
            handle.num_reserved -= reserved

    async def _completed(
        self, handle: Handle, call: ModelCall, found: Continuation, max_tokens: int, *, has_own_limit: bool
    ) -> Reply:
        request, rollout = handle.group.request, self._config.rollout
        sampling = rollout.sampling(request)
        del sampling["max_response_tokens"]  # one of the limits of `max_tokens`
        completion = Completion(
            call_id=f"{request.request_id}/{handle.episode.index}/{uuid.uuid4().hex}",
            token_ids=found.token_ids,
            max_tokens=max_tokens,
            stop=(*sampling.pop("stop", ()), *call.stop),
            context=request,
            **sampling,
        )
        began = time.monotonic()
        completed = await self._engines.generate(
            completion,
            affinity=request.request_id,
            min_version=request.min_version,
            timeout_s=rollout.start_timeout_s,
        )
        sampled_at = time.monotonic()
        sequence = completed.sequences[0]
        mark = NO_MARK if call.text is None else text_mark(call.text + self._decode(sequence.token_ids.tolist()))
        turn = sampled_turn(
            handle.episode.index,
            sequence,
            call=call.digest,
            parent=found.parent,
            context_ids=found.context_ids,
            mark=mark,
            has_own_limit=has_own_limit,
        )
        await self._episodes.record(handle, turn)
        self._took("engine", sampled_at - began)
        self._took("journal", time.monotonic() - sampled_at)
        return _reply(found.token_ids, turn)

    def _limit(self, handle: Handle, found: Continuation) -> int:
        """Tokens that a reply may have, whatever its client asks for. Raises: LimitError."""
        settings, rollout, episode = self._settings, self._config.rollout, handle.episode
        if len(episode.turns) + handle.num_calls > settings.max_turns:  # this call is one of them
            raise LimitError(f"the episode has {settings.max_turns} calls (agents.max_turns): give its reward")
        most = settings.max_tokens or self._config.learner.microbatch_tokens
        room = min(
            most - episode.num_tokens - handle.num_reserved - len(found.context_ids),
            rollout.longest_sequence - len(found.token_ids),
        )
        if room < 1:
            raise LimitError(
                f"the episode has no room for a further token: {episode.num_tokens} of {most} (agents.max_tokens), and "
                f"{len(found.token_ids)} of {rollout.longest_sequence} in this call (rollout.max_prompt_tokens + "
                "max_response_tokens): give its reward"
            )
        asked = handle.group.request.max_response_tokens or rollout.max_response_tokens
        return min(room, rollout.max_response_tokens, asked)


def _reply(prompt_token_ids: list[int], turn: Sampled) -> Reply:
    return Reply(
        prompt_token_ids=prompt_token_ids,
        token_ids=turn.token_ids,
        logprobs=turn.logprobs,
        truncated=turn.truncated,
    )
