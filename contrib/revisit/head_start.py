"""Head starts: re-evaluations begin with the first tokens of a success of their prompt (PrefixRL, arXiv 2601.18795).

    request --prompt + first l tokens of its last success--> G continuations --k' right--> l
              (of fresh requests and evaluations: nothing)

For each prompt with a success y* of T tokens, k right of n responses without a head so far, and p = (k + 1) / (n + 2):

    first    l = T (1 - ln 2 / ln(1 / p)), at least 0 and at most T - 1    success rate from y*[1:l]: p^(1 - l/T) = 1/2
    then     k' >= G/2 of its group:  l <- 3 l / 4;  below 4 tokens l <- 0, an ordinary re-evaluation
             k' = 0:                  l <- l + (T - l) / 4
             else                     l stays

The head is part of the prompt: no loss, no token count. What is known of prompts is this worker's and lost with it: an
experiment, for one worker and a task whose rewards are fast.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import numpy as np

from bapo.config.tree import Config
from bapo.core.types import Purpose, RolloutRequest
from bapo.tasks.base import Task
from rollout_server.rollouts.base import Rollout, completion_of, sampled
from rollout_server.sampler import Sampler
from rollout_server.tokenization import EncodedPrompt, Tokenization

log = logging.getLogger(__name__)

SHORTEST = 4
"""Tokens of a head; a shorter one is none."""


@dataclass(slots=True)
class Known:
    """What the responses to a prompt have shown."""

    num: int = 0
    num_right: int = 0
    success: tuple[int, ...] = ()
    """Tokens of its last right response, from the beginning."""
    length: int | None = None
    """Of the head; None: there was none yet."""

    @property
    def p(self) -> float:
        return (self.num_right + 1) / (self.num + 2)

    def head(self) -> tuple[int, ...]:
        """The tokens that the next re-evaluation begins with."""
        if not self.success:
            return ()
        size = len(self.success)
        if self.length is None:
            self.length = round(size * (1 - math.log(2) / math.log(1 / self.p)))
        self.length = min(max(self.length, 0), size - 1)
        if self.length < SHORTEST:
            self.length = 0
        return self.success[: self.length]

    def learn(self, num: int, num_right: int, head: int) -> None:
        """Count a group, or move the head by it."""
        if not head:
            self.num, self.num_right = self.num + num, self.num_right + num_right
        elif num_right >= num / 2:
            self.length = 3 * head // 4
        elif num_right == 0:
            self.length = head + math.ceil((len(self.success) - head) / 4)


class HeadStart:
    """A `RolloutProgram`."""

    def __init__(self, config: Config, tokenization: Tokenization, sampler: Sampler, task: Task) -> None:
        self._config, self._tokenization, self._sampler, self._task = config, tokenization, sampler, task
        self._known: dict[str, Known] = {}

    async def run(self, request: RolloutRequest) -> Rollout:
        """Sample."""
        prompt = self._tokenization.encode_prompt(request.prompt)
        known = self._known.setdefault(request.prompt.prompt_id, Known())
        head = list(known.head()) if request.purpose is Purpose.REEVALUATE else []
        completion = completion_of(request, EncodedPrompt(token_ids=prompt.token_ids + head), self._config)
        completion = replace(completion, max_tokens=completion.max_tokens - len(head))
        found = await sampled(self._sampler, completion)
        texts = self._tokenization.decode([head + one.token_ids.tolist() for one in found.sequences])
        sequences = tuple(replace(one, text=text) for one, text in zip(found.sequences, texts, strict=True))
        if request.purpose is not Purpose.EVALUATE:
            self._learn(request, known, head, [one.token_ids.tolist() for one in sequences], texts)
        return Rollout(request=request, prompt_token_ids=found.token_ids, sequences=sequences)

    def _learn(
        self, request: RolloutRequest, known: Known, head: list[int], tokens: list[list[int]], texts: list[str]
    ) -> None:
        rewards = np.array([self._task.reward(request.prompt, text) for text in texts])
        num_right = int((rewards == 1.0).sum())
        if request.purpose is Purpose.REEVALUATE:
            log.info(
                "head start step %d prompt %s p %.3f head %d of %d right %d of %d", request.step,
                request.prompt.prompt_id, known.p, len(head), len(known.success), num_right, len(texts),
            )  # fmt: skip
        known.learn(len(texts), num_right, len(head))
        if num_right:
            known.success = tuple(head + tokens[int(np.argmax(rewards == 1.0))])
