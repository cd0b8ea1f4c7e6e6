"""Distillation: the teacher's log-prob of each sampled token, after the responses of a group are there.

    request --another program--> responses --teacher (at most `distillation.concurrency` groups at a time)--> Rollout
                                     \\'--> it is away: the group waits, and the call is repeated after a pause

A group that waits keeps its lease and is not counted as being sampled, so that the engine keeps sampling; a worker
holds no more than about twice `rollout.max_groups_in_flight` groups. Evaluations have no teacher.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from bapo.core.errors import ConfigError, ContractError, GradingError, UnavailableError
from bapo.core.token_arrays import Float32s
from bapo.core.types import Purpose, RolloutRequest
from bapo.transport.teacher_client import TeacherClient
from rollout_server.rollouts.base import Rollout, RolloutProgram

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Of a group between two calls while the teacher is away; each is twice the one before it."""
LOG_S = 60.0
"""Between two lines about a teacher that is away."""


class UntaughtError(GradingError):
    """The teacher refuses to score these tokens, or what it says of them are not log-probs."""

    reason = "no_teacher"


class WithTeacher:
    """A `RolloutProgram` whose responses have `teacher_logprobs`."""

    def __init__(
        self,
        program: RolloutProgram,
        teacher: TeacherClient,
        *,
        concurrency: int,
        on_pause: Callable[[str, bool], None] = lambda request_id, paused: None,
    ) -> None:
        """
        Args:
            program: samples the responses.
            on_pause: called when a group begins (True) or ends (False) to wait for the teacher.
        """
        self._program, self._teacher, self._on_pause = program, teacher, on_pause
        self._calls = ThreadPoolExecutor(concurrency, thread_name_prefix="teacher")
        self._num_waiting = 0
        self._reason = ""
        """Of the last call, if it failed."""
        self._away_since, self._logged_at = 0.0, -math.inf

    @property
    def waiting_for(self) -> str:
        """How many groups wait for a teacher that is away, where it should be, and why it does not answer; else ""."""
        num, reason = self._num_waiting, self._reason
        return f"{num} groups are waiting for the teacher: {reason}" if num and reason else ""

    async def run(self, request: RolloutRequest) -> Rollout:
        """Raises: as of the program; UntaughtError."""
        rollout = await self._program.run(request)
        if request.purpose is Purpose.EVALUATE:
            return rollout
        if request.prompt.images:
            raise UntaughtError("its prompt has images, which are not sent to a teacher; remove [distillation]")
        self._num_waiting += 1
        self._on_pause(request.request_id, True)
        try:
            found = await self._scored(rollout)
        finally:
            self._num_waiting -= 1
            self._on_pause(request.request_id, False)
        sequences = zip(rollout.sequences, found, strict=True)
        return replace(rollout, sequences=tuple(replace(each, teacher_logprobs=scores) for each, scores in sequences))

    async def _scored(self, rollout: Rollout) -> list[Float32s]:
        """[L] of each response, however long that takes."""
        prompt = rollout.prompt_token_ids.tolist()
        responses = [sequence.token_ids.tolist() for sequence in rollout.sequences]
        loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
        while True:
            try:
                found = await loop.run_in_executor(self._calls, self._teacher.logprobs, prompt, responses)
            except (UnavailableError, ConfigError) as error:  # ConfigError: it serves another model
                self._is_away(str(error))
            except ContractError as error:
                raise UntaughtError(str(error)) from error
            else:
                self._is_back()
                return found
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _is_away(self, reason: str) -> None:
        now = time.monotonic()
        self._away_since = self._away_since if self._reason else now
        self._reason = reason
        if now - self._logged_at > LOG_S:
            self._logged_at = now
            log.warning("%s (for %.0f s)", self.waiting_for, now - self._away_since)

    def _is_back(self) -> None:
        if self._reason:
            log.info("the teacher at %s answers after %.0f s", self._teacher.url, time.monotonic() - self._away_since)
        self._reason, self._logged_at = "", -math.inf
