"""Reward functions of TRL's GRPOTrainer: `f(completions, **columns) -> list[float | None]`, sync or async.

    reward = "trl:my_rewards.accuracy"      or "trl:my_rewards:accuracy", "trl:my_rewards.py:accuracy"

As in TRL: `completions` are texts, or lists of one assistant message if the prompts are messages; every column is a
list with the row's value for each completion; `prompts` is passed too. The beginning of an answer in the prompt is part
of the completion. None means ungraded.

Not supported: `completion_ids` and `trainer_state` (a grader has neither; functions that require them are rejected) and
reward models. `log_extra` and `log_metric` are accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bapo.core.types import Prompt
from bapo.tasks.base import ASSISTANT, columns_of, conversation_of
from bapo.tasks.user_functions import call_with, load_function, settled

GRADES_GROUPS = True
"""The function is called with all completions of a prompt together."""


def make_reward(name: str) -> Callable[[Prompt, Sequence[str]], Sequence[float | None]]:
    """Wrap the function; called once per group. Raises: ConfigError."""
    function = load_function(name, key="reward trl:", dots=True)

    def of_group(prompt: Prompt, texts: Sequence[str]) -> Sequence[float | None]:
        messages = conversation_of(prompt)
        if messages and messages[-1]["role"] == ASSISTANT:
            messages = messages[:-1]  # it is the beginning of the completions
        completions = [_completion(text, is_message=messages is not None) for text in texts]
        given = {
            "prompts": [prompt.text if messages is None else messages] * len(texts),
            "completions": completions,
            "log_extra": _ignore,
            "log_metric": _ignore,
        }
        columns = {column: [value] * len(texts) for column, value in columns_of(prompt).items()}
        found = call_with(function, given, columns)
        (rewards,) = settled([found])
        if not isinstance(rewards, Sequence | np.ndarray) or len(rewards) != len(texts):
            raise TypeError(f"returned {rewards!r:.200} for {len(texts)} completions; expected one reward for each")
        return list(rewards)

    return of_group


def _completion(text: str, *, is_message: bool) -> str | list[dict[str, str]]:
    return [{"role": "assistant", "content": text}] if is_message else text


def _ignore(*_: object, **__: object) -> None:
    """Stub for TRL's logging callbacks, which BAPO does not record."""
