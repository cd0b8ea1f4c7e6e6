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
from bapo.core.types import Batch, BatchEntry, Group, Outcome, Prompt, Response
from bapo.runtime.run_directory.responses import TokenRow
from bapo.tasks.base import Task
from bapo.tasks.registry import extract_of, load_task
from learner.batch.packing import token_spans
from learner.diagnostics.token_values import Float32s, TokenValues

log = logging.getLogger(__name__)

TOKEN_BYTES = 18
"""Of one token in a file, about: measured on Countdown, 8,500 tokens a step; longer words take more."""
FRAME_TOKEN_BYTES = 8
"""Of one token in a frame: its id and its log-prob."""
MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """One step on its way to the disk."""

    batch: Batch
    values: TokenValues | None
    """None: text alone."""
    advantage_M: Float32s | None = None
    """Of the tokens of the batch; None for an empty one."""


class RowMaker:
    """Batches and values become rows. Tokenizer and task are loaded with the first."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._warned = False

    @cached_property
    def _texts(self) -> TokenTexts:
        path = self._config.model.path
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the tokenizer of {path} cannot be loaded: {error}") from error
        return TokenTexts(tokenizer)

    @cached_property
    def _task(self) -> Task | None:
        """None when this machine does not have what it needs."""
        task = self._config.task
        try:
            return load_task(task.name, task.options)
        except BapoError as error:
            log.warning("token records have neither extracted nor gold answers: %s", error)
            return None

    def groups(self, recorded: Recorded, max_bytes: int) -> tuple[list[list[TokenRow]], int]:
        """(rows of each entry of the batch, entries left out because the step alone would pass its limit).

        Args:
            max_bytes: of a file with the numbers of tokens; text alone goes by `diagnostics.texts_mb`.
        """
        batch = recorded.batch
        found: list[list[TokenRow]] = []
        room, token_bytes = float(max_bytes), TOKEN_BYTES
        if recorded.values is None:
            room, token_bytes = float(self._config.diagnostics.texts_mb * MB), FRAME_TOKEN_BYTES
        for entry, span in zip(batch.entries, token_spans(batch), strict=True):
            room -= token_bytes * len(entry.group.token_ids)
            if room < 0 and found:
                break
            found.append(list(self._entry(batch.step, entry, span.start, recorded)))
        return found, len(batch.entries) - len(found)

    def untrained(self, step: int, groups: Iterable[Group]) -> list[list[TokenRow]]:
        """Rows of groups that the step's assembly read and did not train: text alone."""
        return [
            [TokenRow(**self._fields(step, group, row, gold), **self._text_alone(group, response))
             for row, response in enumerate(group.responses)]
            for group in groups
            for gold in [self._gold(group.prompt)]
        ]  # fmt: skip

    def _entry(self, step: int, entry: BatchEntry, start: int, recorded: Recorded) -> Iterator[TokenRow]:
        group, values, advantage_M = entry.group, recorded.values, recorded.advantage_M
        gold = self._gold(group.prompt)
        for row, response in enumerate(group.responses):
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
        """What is known of every response."""
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
            "outcome": Outcome(group.outcomes[row]).name.lower(),
            "oldest_version": int(group.versions[row, 0]),
            "newest_version": int(group.versions[row, 1]),
        }

    def _text_alone(self, group: Group, response: Response) -> dict[str, Any]:
        token_ids = response.token_ids.tolist()
        text = self._texts.graded(token_ids)
        return {
            "origin": None,
            "kind": "rl",
            "advantage": None,
            "extracted": self._extracted(group.prompt, text),
            "token_ids": token_ids,
            "pieces": [text],
            "rollout_logprobs": None,
        }

    def _numbers(self, group: Group, response: Response, values: TokenValues, span: slice) -> dict[str, Any]:
        token_ids = response.token_ids.tolist()
        return {
            "extracted": self._extracted(group.prompt, self._texts.graded(token_ids)),
            "token_ids": token_ids,
            "pieces": self._texts.of(token_ids),
            "rollout_logprobs": response.rollout_logprobs.tolist(),
            "logprobs": _known(values.logprobs_M[span]),
            "entropy": _known(values.entropy_M[span]),
            "ratio": _known(values.ratio_M[span]),
            "clipped": _flags(values.clipped_M[span]),
        }

    def _gold(self, prompt: Prompt) -> str | None:
        task = self._task
        return None if task is None else self._safely(task.gold, prompt)

    def _extracted(self, prompt: Prompt, text: str) -> str | None:
        task, another = self._task, self._config.task.reward is not None
        extract = None if task is None else extract_of(task, another_reward=another)
        return None if extract is None else self._safely(extract, prompt, text)

    def _safely(self, ask: Callable[..., object], *arguments: object) -> str | None:
        """The answer of a task's function, as text; None when it raises, which is logged once."""
        try:
            found = ask(*arguments)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything, and a record needs no answer
            if not self._warned:
                log.warning("token records: the task raised %s: %s", type(error).__name__, error)
            self._warned = True
            return None
        return None if found is None else str(found)


def _known(values_T: NDArray[np.float32]) -> list[float] | None:
    return None if np.isnan(values_T[0]) else values_T.tolist()


def _flags(values_T: NDArray[np.float32]) -> list[bool] | None:
    return None if np.isnan(values_T[0]) else (values_T > 0).tolist()


UNFINISHED = "\ufffd"
"""What a decoder writes for the bytes of a character whose other bytes are in later tokens."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of these tokens."""
        ...


class TokenTexts:
    """The text of each token of a response, so that joined they are the response; remembers those of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._of_one: dict[int, str] = {}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """One text per token, special tokens as they are written. A character of several tokens is the last one's."""
        pieces = [self._one(token_id) for token_id in token_ids]
        if "".join(pieces) == self._text(token_ids):
            return pieces
        return self._grown(token_ids)

    def graded(self, token_ids: Sequence[int]) -> str:
        """What the verifier read: without special tokens, as the engines decode it."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _one(self, token_id: int) -> str:
        if token_id not in self._of_one:
            self._of_one[token_id] = self._text([token_id])
        return self._of_one[token_id]

    def _grown(self, token_ids: Sequence[int]) -> list[str]:
        """What each token adds to the text of those before it, looking back no further than the last whole character:
        so a response of n tokens costs n short decodings and not one of n tokens each."""
        pieces: list[str] = []
        begin = done = 0  # ids[begin:done] is text that is out already, and the context of what follows
        for end in range(1, len(token_ids) + 1):
            before, now = self._text(token_ids[begin:done]), self._text(token_ids[begin:end])
            if now.endswith(UNFINISHED) and end < len(token_ids):
                pieces.append("")
                continue
            pieces.append(now[len(before) :])
            begin, done = done, end
        return pieces

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False) if len(token_ids) else ""
