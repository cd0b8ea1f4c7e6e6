"""Majority vote over the responses to a prompt (maj@k): is the most frequent answer correct?

Only for tasks that extract answers from responses (`bapo.tasks.base.extract_of`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
from tokenizers import Tokenizer

from bapo.core.types import Group, Prompt
from bapo.runtime.model_files import folder_of

log = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]
Extract = Callable[[Prompt, str], str | None]


class MajorityVote:
    """The votes of the responses of a group."""

    def __init__(self, extract: Extract | None, load_decoder: Callable[[], Decode | None]) -> None:
        """`load_decoder`: returns what turns token ids into text, if it can; called for a task with answers alone."""
        self._extract = extract
        self._decode = load_decoder() if extract else None

    def of(self, groups: Sequence[Group]) -> Mapping[str, float] | None:
        """Prompt id -> reward of the most frequent answer, the mean of several; None if no response has an answer."""
        if self._extract is None or self._decode is None:
            return None
        answers = [self._answers(self._extract, self._decode, group) for group in groups]
        if all(answer is None for found in answers for answer in found):
            return None
        votes = zip(groups, answers, strict=True)
        return {group.prompt.prompt_id: majority_reward(found, group.rewards.tolist()) for group, found in votes}

    def _answers(self, extract: Extract, decode: Decode, group: Group) -> list[str | None]:
        starts = np.cumsum(group.lengths)[:-1]
        return [extract(group.prompt, decode(tokens.tolist())) for tokens in np.split(group.token_ids, starts)]


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


def decoder_of(model_path: str) -> Decode | None:
    """Decode with the tokenizer.json of a model, without special tokens; None if it has none.

    Not by transformers: importing it takes seconds of CPU in every start of the evaluator, and 300 MB.
    """
    folder = folder_of(model_path)
    if folder is None or not (file := folder / "tokenizer.json").is_file():
        log.warning("maj@k is not measured: %s has no tokenizer.json", model_path)
        return None
    return cast(Decode, Tokenizer.from_file(str(file)).decode)
