"""Write token records beside the training: the step's values are handed over, a thread makes text and file of them.

    Learner.record --put--> queue of 2 --thread--> decode, extract, write RUN/token_records, remove the oldest

Nothing that happens here ends or delays a run: a step that comes while two wait is left out and said so in the log, a
disk that refuses ends the recording and not the training, and a user's `extract` that hangs holds up this thread alone.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from bapo.config.tree import Config
from bapo.errors import BapoError, StorageError
from bapo.tasks.base import Task
from bapo.tasks.registry import extract_of, load_task
from bapo.token_files import TokenFiles, TokenRow
from bapo.types import Batch, BatchEntry, Outcome, Prompt
from learner.pieces import Pieces
from learner.token_trace import TokenValues

log = logging.getLogger(__name__)

MAX_WAITING = 2
TOKEN_BYTES = 18
"""Of one token in a file, about: measured on Countdown, 8,500 tokens a step (ADR 0103); longer words take more."""
CLOSE_S = 10.0
MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """One step on its way to the disk."""

    batch: Batch
    values: TokenValues


class TokenRecorder:
    """One per run, on the rank that writes records. The thread starts with the first step that is recorded."""

    def __init__(self, config: Config, files: TokenFiles) -> None:
        self._config = config
        self._files = files
        self._queue: queue.Queue[Recorded | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._failed = False

    def put(self, batch: Batch, values: TokenValues) -> None:
        """Hand one step over; returns at once."""
        if self._failed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="token-records", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(Recorded(batch=batch, values=values))
        except queue.Full:
            log.warning("step %d has no token record: %d steps wait to be written", batch.step, MAX_WAITING)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait for what was handed over, at most this long."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):  # then the join runs into its limit, which says it
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("token records: the last steps are not written after %.0f s", timeout_s)

    def _serve(self) -> None:
        rows = RowMaker(self._config)
        while (recorded := self._queue.get()) is not None:
            try:
                self._write(recorded, rows)
            except StorageError as error:
                self._failed = True
                log.warning("token records end at step %d, training goes on: %s", recorded.batch.step, error)
                return

    def _write(self, recorded: Recorded, rows: RowMaker) -> None:
        limit = self._config.diagnostics.token_records_mb * MB
        groups, left_out = rows.groups(recorded, limit)
        num_bytes = self._files.write(recorded.batch.step, groups, left_out=left_out)
        removed = self._files.shrink(limit)
        log.debug("step %d tokens of %d groups, %d bytes", recorded.batch.step, len(groups), num_bytes)
        if removed:
            log.debug("token records of steps %s removed: diagnostics.token_records_mb is full", removed)


class RowMaker:
    """Batches and values become rows. Tokenizer and task are loaded with the first."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._said = False

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(AutoTokenizer.from_pretrained(self._config.model.path))

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
        """(rows of each group, groups left out because the step alone would pass the limit)."""
        batch, found, room = recorded.batch, [], float(max_bytes)
        for entry, start in zip(batch.entries, _starts(batch), strict=True):
            room -= TOKEN_BYTES * len(entry.group.token_ids)
            if room < 0 and found:
                break
            found.append(list(self._rows(batch.step, entry, start, recorded.values)))
        return found, len(batch.entries) - len(found)

    def _rows(self, step: int, entry: BatchEntry, start: int, values: TokenValues) -> Iterator[TokenRow]:
        group = entry.group
        gold = self._gold(group.prompt)
        for row, response in enumerate(group.responses):
            span = slice(start, start + len(response.token_ids))
            start = span.stop
            yield TokenRow(
                step=step,
                group_id=group.group_id,
                prompt_id=group.prompt.prompt_id,
                prompt=group.prompt.text,
                task=group.prompt.task,
                answer=group.prompt.answer,
                gold=gold,
                origin=entry.origin.value,
                kind=entry.kind,
                row=row,
                reward=response.reward,
                outcome=Outcome(response.outcome).name.lower(),
                oldest_version=int(group.versions[row, 0]),
                newest_version=int(group.versions[row, 1]),
                extracted=self._extracted(group.prompt, response.token_ids.tolist()),
                advantage=float(values.advantage_M[span].mean()),
                token_ids=response.token_ids.tolist(),
                pieces=self._pieces.of(response.token_ids.tolist()),
                rollout_logprobs=response.rollout_logprobs.tolist(),
                logprobs=_known(values.logprobs_M[span]),
                entropy=_known(values.entropy_M[span]),
                ratio=_known(values.ratio_M[span]),
                clipped=_flags(values.clipped_M[span]),
            )

    def _gold(self, prompt: Prompt) -> str | None:
        task = self._task
        return None if task is None else self._safely(task.gold, prompt)

    def _extracted(self, prompt: Prompt, token_ids: Sequence[int]) -> str | None:
        # Another reward than the task's own reads another answer.
        task = None if self._config.task.reward else self._task
        extract = None if task is None else extract_of(task)
        return None if extract is None else self._safely(extract, prompt, self._pieces.graded(token_ids))

    def _safely(self, ask: Callable[..., object], *arguments: object) -> str | None:
        """What a task says of a prompt or a text, as text; None when it raises, which is said once."""
        try:
            found = ask(*arguments)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            if not self._said:
                log.warning("token records: the task raised %s: %s", type(error).__name__, error)
            self._said = True
            return None
        return None if found is None else str(found)


def _starts(batch: Batch) -> list[int]:
    """Where the tokens of each entry begin in the batch's columns."""
    return np.cumsum([0, *(len(entry.group.token_ids) for entry in batch.entries[:-1])]).tolist()


def _known(values_T: NDArray[np.float32]) -> list[float] | None:
    return None if np.isnan(values_T[0]) else values_T.tolist()


def _flags(values_T: NDArray[np.float32]) -> list[bool] | None:
    return None if np.isnan(values_T[0]) else (values_T > 0).tolist()
