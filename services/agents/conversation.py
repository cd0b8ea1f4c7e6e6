"""One conversation of an episode: messages, calls of the model, and the limits that end it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai import BadRequestError

from bapo.config.agents import AgentsConfig
from services.agents.outcome import OpenAIClient

log = logging.getLogger(__name__)

Message = dict[str, Any]
LIMITS = ("give its reward", "maximum context length", "maximum model length")
"""In the refusals of a call that does not fit any more: ours, and those of vLLM."""


@dataclass(slots=True, kw_only=True)
class Conversation:
    """What was said in one episode."""

    client: OpenAIClient
    settings: AgentsConfig
    messages: list[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    num_calls: int = field(default=0, init=False)

    async def reply(self) -> Message | None:
        """The model's next message, which becomes part of the conversation; None at a limit of turns or tokens.

        A limit is an end and not an error: a model that talks too long would otherwise have no reward, and be sampled
        until it is brief by chance. The first call always fits, or is a mistake of the config.
        """
        if self.num_calls >= self.settings.max_turns:
            return None
        extra: dict[str, Any] = {"tools": list(self.tools)} if self.tools else {}
        try:
            completion = await self.client.chat.completions.create(
                model=self.settings.model_name, messages=self.messages, **extra
            )
        except BadRequestError as error:
            if self.num_calls == 0 or not any(phrase in str(error) for phrase in LIMITS):
                raise
            log.debug("the conversation ends at a limit: %s", error)
            return None
        self.num_calls += 1
        message: Message = completion.choices[0].message.model_dump(exclude_none=True)
        self.messages.append(message)
        return message
