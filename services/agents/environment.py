"""What an environment is: a class with `reset` and `step`, one instance an episode.

    class Guess:
        def reset(self, prompt):
            self.secret = prompt.answer["number"]

        def step(self, text):                       # observation, reward, done
            if str(self.secret) in text:
                return None, 1.0, True
            return "No, guess again.", 0.0, False

Methods may be sync, and then run in a thread, or async.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from bapo.core.types import Prompt

Messages = Sequence[Mapping[str, Any]]
Step = tuple["str | Messages | None", "float | None", bool]
"""Observation, reward, and whether the episode has ended. A text is the user's next message; messages are added as they
are. Rewards add up to that of the episode, in [0, 1]; if all are None, the task's reward function grades the last text.
An environment that rewards the end alone returns 0.0 before: an episode that a limit ends has then a reward, too."""


class Environment(Protocol):
    """One episode. `close(self)`, if there is one, is called at its end, whatever the end is."""

    def reset(self, prompt: Prompt) -> Messages | str | Awaitable[Messages | str | None] | None:
        """Begin. Returns: the conversation, or the first message of the user; None: those of the prompt."""
        ...

    def step(self, text: Any) -> Step | Awaitable[Step]:
        """What follows a message of the model: its text. An environment with `tools`, a list of functions' schemas as
        OpenAI's API takes them, gets the whole message, a dict with `content` and `tool_calls`, and answers with
        messages of role `tool`."""
        ...
