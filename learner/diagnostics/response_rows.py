"""Rows of token records: batches, the values of their tokens, and groups that did not train, as text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from bapo.config.tree import Config
from bapo.core.errors import BapoError, ConfigError
from bapo.core.reward_details import details_of
from bapo.core.sequences import SampledSequence, sequences_of
from bapo.core.token_arrays import Int32s
from bapo.core.types import Batch, BatchEntry, Group, Outcome, Prompt
from bapo.runtime.run_directory.responses import TokenRow
from bapo.runtime.run_directory.transcripts import TurnText
from bapo.tasks.base import Task, extract_of
from bapo.tasks.registry import task_of
from learner.batch.columns import token_spans
from learner.diagnostics.step_report import Float32s, TokenValues

log = logging.getLogger(__name__)

TOKEN_BYTES = 18
"""Approximate bytes per token in a file: measured on Countdown with 8,500 tokens per step."""
FRAME_TOKEN_BYTES = 8
"""Bytes per token in a frame: id and log-prob."""
CONTEXT_TOKEN_BYTES = 4
"""Bytes per context token, which has an id and a text alone."""
MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """One step to write."""

    batch: Batch
    values: TokenValues | None
    """None: text only."""
    advantage_M: Float32s | None = None
    """Advantages of the tokens; None for an empty batch."""


class RowMaker:
    """Converts batches and values to rows. Tokenizer and task are loaded on first use."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._warned = False

    @cached_property
    def _texts(self) -> TokenTexts:
        path = self._config.model.path
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot load the tokenizer of {path}: {error}") from error
        return TokenTexts(tokenizer)

    @cached_property
    def _task(self) -> Task | None:
        """None if the task cannot be loaded on this machine."""
        try:
            return task_of(self._config)
        except BapoError as error:
            log.warning("token records have neither extracted nor gold answers: %s", error)
            return None

    def groups(self, recorded: Recorded, max_bytes: int) -> tuple[list[list[TokenRow]], int]:
        """(rows of each entry of the batch, number of entries skipped to stay within the limit).

        Args:
            max_bytes: limit of a file with token values; text only is limited by `diagnostics.texts_mb`.
        """
        batch = recorded.batch
        found: list[list[TokenRow]] = []
        room, token_bytes = float(max_bytes), TOKEN_BYTES
        if recorded.values is None:
            room, token_bytes = float(self._config.diagnostics.texts_mb * MB), FRAME_TOKEN_BYTES
        for entry, span in zip(batch.entries, token_spans(batch), strict=True):
            room -= token_bytes * len(entry.group.token_ids)
            if entry.group.context_ids is not None:
                room -= CONTEXT_TOKEN_BYTES * len(entry.group.context_ids)
            if room < 0 and found:
                break
            found.append(list(self._entry(batch.step, entry, span.start, recorded)))
        return found, len(batch.entries) - len(found)

    def untrained(self, step: int, groups: Iterable[Group]) -> list[list[TokenRow]]:
        """Rows of groups that the step's assembly read but did not train; text only."""
        return [
            [TokenRow(**self._fields(step, group, row, gold), **self._text_alone(group, response))
             for row, response in enumerate(sequences_of(group))]
            for group in groups
            for gold in [self._gold(group.prompt)]
        ]  # fmt: skip

    def _entry(self, step: int, entry: BatchEntry, start: int, recorded: Recorded) -> Iterator[TokenRow]:
        group, values, advantage_M = entry.group, recorded.values, recorded.advantage_M
        gold = self._gold(group.prompt)
        for row, response in enumerate(sequences_of(group)):
            span = slice(start, start + len(response.token_ids))
            start = span.stop
            numbers = (
                self._text_alone(group, response) if values is None else self._numbers(group, response, values, span)
            )
            yield TokenRow(
                **self._fields(step, group, row, gold),
                **numbers
                | {
                    "origin": entry.origin.value,
                    "kind": entry.kind,
                    "advantage": None if advantage_M is None else float(advantage_M[span].mean()),
                },
            )

    def _fields(self, step: int, group: Group, row: int, gold: str | None) -> dict[str, Any]:
        """Fields of every response."""
        return {
            "step": step,
            "group_id": group.group_id,
            "prompt_id": group.prompt.prompt_id,
            "prompt": group.prompt.text,
            "task": group.prompt.task,
            "answer": group.prompt.answer,
            "images": group.prompt.images,
            "gold": gold,
            "row": row,
            "reward": float(group.rewards[row]),
            "reward_details": details_of(group.reward_details, row),
            "outcome": Outcome(group.outcomes[row]).name.lower(),
            "oldest_version": int(group.versions[row, 0]),
            "newest_version": int(group.versions[row, 1]),
            "engine_prompt": self._engine_prompt(group),
        }

    def _engine_prompt(self, group: Group) -> str | None:
        """Of episodes: an agent writes more than the prompt's text, such as tools and what a chat template adds."""
        if group.turns is None or not len(group.prompt_token_ids):
            return None
        text = self._texts.whole(group.prompt_token_ids.tolist())
        return None if text == group.prompt.text else text

    def _text_alone(self, group: Group, response: SampledSequence) -> dict[str, Any]:
        texts = [self._texts.graded(ids) for ids in _sampled_by_turn(response)]
        return {
            "origin": None,
            "kind": "rl",
            "advantage": None,
            "extracted": self._extracted(group.prompt, texts[-1]),
            "token_ids": response.token_ids.tolist(),
            "pieces": texts,
            "rollout_logprobs": None,
            "turns": self._turns(response),
        }

    def _numbers(self, group: Group, response: SampledSequence, values: TokenValues, span: slice) -> dict[str, Any]:
        sampled = _sampled_by_turn(response)
        return {
            "extracted": self._extracted(group.prompt, self._texts.graded(sampled[-1])),
            "token_ids": response.token_ids.tolist(),
            "pieces": [piece for ids in sampled for piece in self._texts.of(ids)],
            "rollout_logprobs": response.rollout_logprobs.tolist(),
            "logprobs": _known(values.logprobs_M[span]),
            "entropy": _known(values.entropy_M[span]),
            "ratio": _known(values.ratio_M[span]),
            "clipped": _flags(values.clipped_M[span]),
            "turns": self._turns(response),
        }

    def _turns(self, response: SampledSequence) -> tuple[TurnText, ...]:
        turns = response.turns
        if turns is None or (len(turns.parents_U) == 1 and turns.reads_prompt and not len(turns.context_ids)):
            return ()  # nothing but the prompt came before it
        contexts = _split(turns.context_ids, turns.num_context_U)
        return tuple(
            TurnText(parent=parent, num_tokens=num_tokens, context=self._texts.whole(context))
            for parent, num_tokens, context in zip(
                turns.parents_U.tolist(), turns.num_sampled_U.tolist(), contexts, strict=True
            )
        )

    def _gold(self, prompt: Prompt) -> str | None:
        task = self._task
        return None if task is None else self._safely(task.gold, prompt)

    def _extracted(self, prompt: Prompt, text: str) -> str | None:
        task, another = self._task, self._config.task.has_another_reward
        extract = None if task is None else extract_of(task, another_reward=another)
        return None if extract is None else self._safely(extract, prompt, text)

    def _safely(self, ask: Callable[..., object], *arguments: object) -> str | None:
        """Result of a task's function as text; None if it raises, which is logged once."""
        try:
            found = ask(*arguments)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything, and the field is optional
            if not self._warned:
                log.warning("token records: the task raised %s: %s", type(error).__name__, error)
            self._warned = True
            return None
        return None if found is None else str(found)


def _sampled_by_turn(response: SampledSequence) -> list[list[int]]:
    """Sampled tokens of each turn, at least one: the last one's text is what a reward function reads."""
    if response.turns is None:
        return [response.token_ids.tolist()]
    return _split(response.token_ids, response.turns.num_sampled_U)


def _split(ids: Int32s, sizes_U: Int32s) -> list[list[int]]:
    return [part.tolist() for part in np.split(ids, np.cumsum(sizes_U)[:-1])]


def _known(values_T: NDArray[np.float32]) -> list[float] | None:
    return None if np.isnan(values_T[0]) else values_T.tolist()


def _flags(values_T: NDArray[np.float32]) -> list[bool] | None:
    return None if np.isnan(values_T[0]) else (values_T > 0).tolist()


UNFINISHED = "\ufffd"
"""Output of a decoder for an incomplete UTF-8 character."""


class Tokenizer(Protocol):
    """The interface of a transformers tokenizer used here."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of these tokens."""
        ...


class TokenTexts:
    """Decodes responses token by token such that the joined texts equal the response; caches single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._of_one: dict[int, str] = {}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """One text per token, including special tokens. A character of several tokens is assigned to the last one."""
        pieces = [self._one(token_id) for token_id in token_ids]
        if "".join(pieces) == self.whole(token_ids):
            return pieces
        return self._grown(token_ids)

    def graded(self, token_ids: Sequence[int]) -> str:
        """The graded text: without special tokens, as decoded by the engines."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def whole(self, token_ids: Sequence[int]) -> str:
        """The text with special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False) if len(token_ids) else ""

    def _one(self, token_id: int) -> str:
        if token_id not in self._of_one:
            self._of_one[token_id] = self.whole([token_id])
        return self._of_one[token_id]

    def _grown(self, token_ids: Sequence[int]) -> list[str]:
        """Text added by each token, decoded with context back to the last complete character: n short decodings instead
        of n decodings of up to n tokens."""
        pieces: list[str] = []
        begin = done = 0  # ids[begin:done] is already emitted and the context of what follows
        for end in range(1, len(token_ids) + 1):
            before, now = self.whole(token_ids[begin:done]), self.whole(token_ids[begin:end])
            if now.endswith(UNFINISHED) and end < len(token_ids):
                pieces.append("")
                continue
            pieces.append(now[len(before) :])
            begin, done = done, end
        return pieces
