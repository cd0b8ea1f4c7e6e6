"""Checks of every prompt as tokens: its length, and ids that the model has embeddings for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from bapo.core.errors import BapoError
from bapo.core.types import Prompt
from bapo.runtime.model_files import UNKNOWN, embedding_rows
from bapo.tasks.base import ROW
from bapo.tasks.prompt_tokens import ended_prompts, prompt_token_ids, round_trips_of
from services.launcher.doctor.checks import Check
from services.launcher.doctor.file_tokenizer import SETTINGS, TOKENIZER, FileTokenizer, has_tokenizer
from services.launcher.doctor.situation import Situation

NUM_ROUND_TRIPS = 64
NUM_ENDS = 20
"""Prompts whose last token is looked at."""


def tokenizer_files(situation: Situation) -> Iterator[Check]:
    """The model has the files of a tokenizer."""
    folder, path = situation.model_folder, situation.config.model.path
    if folder is None or situation.config.rollout.engine != "vllm":
        return
    missing = [] if has_tokenizer(folder) else [f"tokenizer, such as {TOKENIZER}"]
    missing += [] if (folder / SETTINGS).is_file() else [SETTINGS]
    if missing:
        detail = f"model.path: {path} has no {' and no '.join(missing)}; copy the files from its base model"
        yield Check(name="tokenizer", status="fail", detail=detail)


@dataclass(slots=True)
class _Found:
    """What is wrong with prompts, counted."""

    num: int = 0
    longest: int = 0
    at: str = ""

    def add(self, size: int, prompt: Prompt) -> None:
        self.num += 1
        if size > self.longest:
            self.longest, self.at = size, str(prompt.answer.get(ROW, f"prompt {prompt.prompt_id}"))


def prompts(situation: Situation) -> Iterator[Check]:
    """Every prompt fits `rollout.max_prompt_tokens`, and the model has embeddings for its tokens."""
    folder, config = situation.model_folder, situation.config
    if folder is None or config.rollout.engine != "vllm" or not has_tokenizer(folder):
        return
    if not (folder / TOKENIZER).is_file():
        detail = f"{config.model.path} has no {TOKENIZER}: lengths are checked by the workers, on some prompts"
        yield Check(name="prompts", status="warn", detail=detail)
        return
    try:
        tokenizer = FileTokenizer(folder)
        # The longest texts first: when time is up, the rest is shorter.
        every = sorted(
            chain.from_iterable(map(situation.task.prompts, situation.splits)),
            key=lambda prompt: len(prompt.text),
            reverse=True,
        )
    except (BapoError, OSError, ValueError) as error:
        yield Check(name="prompts", status="fail", detail=str(error))
        return
    limit, num_rows = config.rollout.max_prompt_tokens, embedding_rows(folder)
    long, unknown, num, longest = _Found(), _Found(), 0, 0
    until = time.monotonic() + situation.seconds
    for prompt in every:
        token_ids = prompt_token_ids(tokenizer, prompt)
        num, longest = num + 1, max(longest, len(token_ids))
        if len(token_ids) > limit:
            long.add(len(token_ids), prompt)
        if num_rows is not None and max(token_ids, default=0) >= num_rows:
            unknown.add(max(token_ids), prompt)
        if time.monotonic() > until:
            break
    yield _result(situation, long, unknown, num_rows, _share(num, len(every)), longest)
    found = round_trips_of(tokenizer, every[:: max(1, len(every) // NUM_ROUND_TRIPS)])
    if found.is_wrong and UNKNOWN in found.example[1]:  # any other change may be one of this file, and not of its class
        yield Check(name="prompts", status="fail", detail=found.complaint)
    if complaint := ended_prompts(tokenizer, every[:NUM_ENDS]):
        yield Check(name="prompts", status="warn", detail=complaint)


def _share(num: int, total: int) -> str:
    return f"{total:,}" if num == total else f"the {num:,} longest of {total:,} (time is up)"


def _result(
    situation: Situation, long: _Found, unknown: _Found, num_rows: int | None, checked: str, longest: int
) -> Check:
    limit = situation.config.rollout.max_prompt_tokens
    problems = []
    if long.num:
        problems.append(
            f"{long.num:,} of {checked} prompts are longer than rollout.max_prompt_tokens = {limit}; the longest has "
            f"{long.longest} tokens ({long.at}): set it to {long.longest}, or remove these rows"
        )
    if unknown.num:
        problems.append(
            f"{unknown.num:,} of {checked} prompts have tokens that the model has no embedding for, such as id "
            f"{unknown.longest} of {num_rows} ({unknown.at}): the tokenizer is another model's"
        )
    if problems:
        status = "warn" if situation.is_resumed else "fail"
        return Check(name="prompts", status=status, detail="\n".join(problems))  # type: ignore[arg-type]
    return Check(name="prompts", status="ok", detail=f"{checked} checked; the longest has {longest} of {limit} tokens")
