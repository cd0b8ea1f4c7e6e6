"""Reward functions of TRL's GRPOTrainer: `f(completions, **columns) -> list[float | None]`, sync or async.

    reward = "trl:my_rewards.accuracy"      or "trl:my_rewards:accuracy", "trl:my_rewards.py:accuracy"

As in TRL: `completions` are texts, or lists of one assistant message if the prompts are messages; every column is a
list with the row's value for each completion; `prompts` is passed too. The beginning of an answer in the prompt is part
of the completion. Rewards are whatever has one number for each completion: a list, an array of numpy, a tensor of torch
on any device. None means ungraded, and so does NaN in an array or tensor, which can hold no None.

What the function gives to `log_extra(column, values)` and `log_metric(name, value)` are facts of the responses: the
values of a column, which must be numbers; the mean over the calls of a metric, for each of them.

Not supported: `completion_ids` and `trainer_state` (a grader has neither; functions that require them are rejected) and
reward models.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from bapo.core.types import Prompt
from bapo.core.user_code import load_function
from bapo.tasks.base import ASSISTANT, Graded, columns_of, conversation_of
from bapo.tasks.user_functions import call_with, settled

GRADES_GROUPS = True
"""The function is called with all completions of a prompt together."""


def make_reward(name: str) -> Callable[[Prompt, Sequence[str]], Sequence[Graded]]:
    """Wrap the function; called once per group. Raises: ConfigError."""
    function = load_function(name, key="reward trl:", dots=True)

    def of_group(prompt: Prompt, texts: Sequence[str]) -> Sequence[Graded]:
        logged = _Logged()
        messages = conversation_of(prompt)
        if messages and messages[-1]["role"] == ASSISTANT:
            messages = messages[:-1]  # it is the beginning of the completions
        completions = [_completion(text, is_message=messages is not None) for text in texts]
        given = {
            "prompts": [prompt.text if messages is None else messages] * len(texts),
            "completions": completions,
            "log_extra": logged.extra,
            "log_metric": logged.metric,
        }
        columns = {column: [value] * len(texts) for column, value in columns_of(prompt).items()}
        found = call_with(function, given, columns)
        return logged.added_to(_of_each(settled([found])[0], len(texts)))

    return of_group


class _Logged:
    """What a function logs of one group."""

    def __init__(self) -> None:
        self._columns: defaultdict[str, list[Any]] = defaultdict(list)
        self._metrics: defaultdict[str, list[float]] = defaultdict(list)

    def extra(self, column: str, values: Iterable[Any]) -> None:
        self._columns[column].extend(values)

    def metric(self, name: str, value: float) -> None:
        self._metrics[name].append(float(value))

    def added_to(self, rewards: Sequence[Any]) -> Sequence[Graded]:
        """Raises: TypeError for a column that has not one value for each completion."""
        for column, values in self._columns.items():
            if len(values) != len(rewards):
                raise TypeError(f"log_extra({column!r}) got {len(values)} values for {len(rewards)} completions")
        means = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        if not means and not self._columns:
            return rewards
        rows = [means | {name: values[row] for name, values in self._columns.items()} for row in range(len(rewards))]
        return list(zip(rewards, rows, strict=True))


def _of_each(rewards: Any, num: int) -> list[Any]:
    """The rewards of `num` completions as a list. Raises: TypeError that says how many there are."""
    is_array = hasattr(rewards, "tolist")  # numpy and torch, without importing the latter
    is_list = isinstance(rewards, Iterable) and not isinstance(rewards, str | bytes | Mapping | Set)
    if not is_list or (is_array and getattr(rewards, "ndim", 1) == 0):
        raise TypeError(f"returned {rewards!r:.200} for {num} completions; expected one reward for each, in a list")
    found = rewards.tolist() if is_array and getattr(rewards, "ndim", 1) == 1 else list(rewards)
    if len(found) != num:
        shown = found if isinstance(rewards, Iterator) else rewards
        raise TypeError(
            f"returned {shown!r:.200} for {num} completions; expected one reward for each, got {len(found)}"
        )
    return [None if is_array and isinstance(reward, float) and math.isnan(reward) else reward for reward in found]


def _completion(text: str, *, is_message: bool) -> str | list[dict[str, str]]:
    return [{"role": "assistant", "content": text}] if is_message else text
