"""Figures of a step's episodes: turns, context, forks and calls of tools, over the sampled episodes that train.

Tools are counted in the text that the model wrote, in the hermes format alone:

    <tool_call>{"name": "calc", "arguments": {...}}</tool_call>  ->  one call of calc

A call counts whether or not the agent ran it, and calls in other formats, such as those with the name after the
arguments, do not count.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from bapo.core.sequences import SampledSequence, sequences_of
from bapo.core.types import Batch
from bapo.runtime.run_directory.rows import OTHER_TOOLS

log = logging.getLogger(__name__)

CALL = re.compile(r'<tool_call>\s*\{\s*"name"\s*:\s*"([\w.:/-]{1,64})"(?:(?!<tool_call>).)*?</tool_call>', re.DOTALL)
MAX_DECODED = 256
"""Episodes of a step whose text is searched for calls, evenly spread over the batch: decoding all of a large one would
take seconds of every step."""
MAX_TOOLS = 20
"""Names per step; a model can invent any number of them."""
DIGITS = 6

Decode = Callable[[Sequence[int]], str]


class EpisodeReport:
    """Episode figures of a run. The tokenizer is loaded by the first step that has episodes."""

    def __init__(self, model_path: str) -> None:
        self._model_path = model_path

    def fields(self, batch: Batch) -> dict[str, Any]:
        """Keys of the step's row; empty without episodes."""
        episodes = list(episodes_of(batch))
        return episode_fields(episodes, self._decode) if episodes else {}

    @cached_property
    def _decode(self) -> Decode | None:
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(self._model_path)
        except (OSError, ValueError) as error:
            log.warning("calls of tools are not counted: cannot load the tokenizer of %s: %s", self._model_path, error)
            return None
        return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=False))


def episodes_of(batch: Batch) -> Iterator[SampledSequence]:
    """Sampled responses of the groups that agents made."""
    for entry in batch.entries:
        if entry.group.turns is not None:
            yield from (sequence for sequence in sequences_of(entry.group) if not sequence.is_expert)


def episode_fields(episodes: Sequence[SampledSequence], decode: Decode | None) -> dict[str, Any]:
    """Means over at least one episode.

    Args:
        decode: text of token ids; None: calls are unknown.
    """
    turns = [episode.turns for episode in episodes if episode.turns is not None]
    return {
        "num_episodes": len(turns),
        "episode_turns_mean": _mean([len(one.parents_U) for one in turns]),
        "episode_context_tokens_mean": _mean([len(one.context_ids) for one in turns]),
        "episode_forked_share": _mean([one.num_forks > 0 for one in turns]),
        "episode_calls_mean": None if decode is None else calls_per_episode(episodes, decode),
    }


def calls_per_episode(episodes: Sequence[SampledSequence], decode: Decode) -> dict[str, float]:
    """Tool -> mean calls per episode, the most frequent first."""
    chosen = np.linspace(0, len(episodes) - 1, min(len(episodes), MAX_DECODED)).round().astype(int)
    found = Counter(
        name for index in chosen for text in _texts_of_turns(episodes[index], decode) for name in CALL.findall(text)
    )
    named = found.most_common(MAX_TOOLS)
    others = found.total() - sum(number for _, number in named)
    return {name: round(n / len(chosen), DIGITS) for name, n in [*named, *([(OTHER_TOOLS, others)] if others else [])]}


def _texts_of_turns(episode: SampledSequence, decode: Decode) -> Iterator[str]:
    """One text per turn: a call that the end of a turn cuts is none, whatever the next turn begins with."""
    sizes = [len(episode.token_ids)] if episode.turns is None else episode.turns.num_sampled_U
    for ids in np.split(episode.token_ids, np.cumsum(sizes)[:-1]):
        yield decode(ids.tolist())


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), DIGITS)
