"""Majority vote over the responses to a prompt (maj@k): is the most frequent answer correct?

Only for tasks that extract answers from responses (`HasExtract`); the tokenizer is loaded for the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bapo.core.types import Group
from bapo.tasks.base import HasExtract, Task

Decode = Callable[[Sequence[int]], str]


class MajorityVote:
    """The votes of the responses of a group."""

    def __init__(self, task: Task, load_decoder: Callable[[], Decode]) -> None:
        """`load_decoder`: returns what turns token ids into text; called at most once."""
        self._task = task if isinstance(task, HasExtract) else None
        self._load = load_decoder
        self._decode: Decode | None = None

    def of(self, groups: Sequence[Group]) -> Mapping[str, float] | None:
        """Prompt id -> reward of the most frequent answer, the mean of several; None for a task without answers."""
        if self._task is None:
            return None
        self._decode = self._decode or self._load()
        return {group.prompt.prompt_id: self._vote(self._task, self._decode, group) for group in groups}

    def _vote(self, task: HasExtract, decode: Decode, group: Group) -> float:
        starts = np.cumsum(group.lengths)[:-1]
        texts = [decode(tokens.tolist()) for tokens in np.split(group.token_ids, starts)]
        return majority_reward([task.extract(group.prompt, text) for text in texts], group.rewards.tolist())


def majority_reward(answers: Sequence[str | None], rewards: Sequence[float]) -> float:
    """Mean reward of the most frequent answer, over all of them on a tie; 0 without an answer.

    Example: answers 7, 7, 3 and none with rewards 1, 1, 0 and 0 give 1.
    """
    found: dict[str, list[float]] = {}
    for answer, reward in zip(answers, rewards, strict=True):
        if answer is not None:
            found.setdefault(answer, []).append(reward)
    most = max(map(len, found.values()), default=0)
    winners = [sum(given) / most for given in found.values() if len(given) == most]
    return sum(winners) / len(winners) if winners else 0.0


def decoder_of(model_path: str) -> Decode:
    """Decode with a model's tokenizer, without special tokens."""
    from transformers import AutoTokenizer  # here: it takes seconds to import, and many tasks have no answers

    tokenizer: Any = AutoTokenizer.from_pretrained(model_path)

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    return decode
