"""Write texts and token records in the background: steps are queued, a thread writes their files.

    batch t arrived --expect--> queue --thread--> request the groups that t does not train from the buffer
    step t is done  --put-----> queue --thread--> decode, extract, write RUN/token_records, remove the oldest

Nothing here stops or delays training: a step is skipped with a warning if two are queued, a disk error ends the
recording only, and a user's `extract` that hangs blocks only this thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bapo.config.tree import Config
from bapo.core.errors import BapoError
from bapo.core.types import Batch, Group
from bapo.runtime.run_directory.responses import TokenFiles
from learner.diagnostics.response_rows import MB, Recorded, RowMaker
from learner.diagnostics.step_report import Float32s, TokenValues

log = logging.getLogger(__name__)

MAX_WAITING = 2
CLOSE_S = 10.0
Untrained = Callable[[int], Sequence[Group]]
"""Step -> groups that its assembly did not train. Raises: BapoError."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """Groups that a step does not train."""

    step: int
    groups: Sequence[Group]


class ResponseRecorder:
    """One per run, on the rank that writes records. The thread starts with the first recorded step."""

    def __init__(self, config: Config, files: TokenFiles, untrained: Untrained | None = None) -> None:
        """`untrained`: None without a buffer; existing entries of such groups are kept."""
        self._config = config
        self._files = files
        self._untrained = untrained
        self._queue: queue.SimpleQueue[int | Recorded | None] = queue.SimpleQueue()
        """Expected steps, then the same steps with their results; None: the end."""
        self._room = threading.Semaphore(MAX_WAITING)
        self._newest = 0
        self._thread: threading.Thread | None = None
        self._failed = False

    def expect(self, step: int) -> None:
        """Request the groups that a batch does not train, before its checkpoint releases them. Does not block."""
        if not self._failed and self._untrained is not None and self._keeps_texts(step):
            self._newest = step
            self._start()
            self._queue.put(step)

    def put(self, batch: Batch, values: TokenValues | None, advantage_M: Float32s | None = None) -> None:
        """Queue one step; does not block. `values`: None for text only."""
        if self._failed or (values is None and not self._keeps_texts(batch.step)):
            return
        self._start()
        if not self._room.acquire(blocking=False):
            log.warning("step %d has no token record: %d steps are queued for writing", batch.step, MAX_WAITING)
            return
        advantage_M = advantage_M if values is None else values.advantage_M
        self._queue.put(Recorded(batch=batch, values=values, advantage_M=advantage_M))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write the queued steps, for at most this long."""
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("token records: the last steps were not written within %.0f s", timeout_s)

    def _keeps_texts(self, step: int) -> bool:
        every = self._config.diagnostics.texts
        return every > 0 and step % every == 0

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="token-records", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        try:
            self._serve_all()
        except Exception as error:
            # Thread boundary: a bug here ends the recording with a log message, never the training.
            self._failed = True
            log.exception("token records stopped, training continues: %s", type(error).__name__)

    def _serve_all(self) -> None:
        rows, found = RowMaker(self._config), Found(step=0, groups=())
        while (what := self._queue.get()) is not None:
            if isinstance(what, int):
                # An outdated one is released by now, or its step was skipped.
                found = self._request(what) if what > self._newest - MAX_WAITING else found
                continue
            self._room.release()
            try:
                self._write(what, rows, found)
            except BapoError as error:
                self._failed = True
                log.warning("token records stopped at step %d, training continues: %s", what.batch.step, error)
                return

    def _request(self, step: int) -> Found:
        assert self._untrained is not None
        try:
            return Found(step=step, groups=self._untrained(step))
        except BapoError as error:
            log.warning("step %d has no texts of groups that did not train: %s", step, error)
            return Found(step=step, groups=())

    def _write(self, recorded: Recorded, rows: RowMaker, found: Found) -> None:
        limit, step = self._config.diagnostics.token_records_mb * MB, recorded.batch.step
        if self._untrained is None:
            others = self._files.read_untrained(step)
        else:
            others = rows.untrained(step, found.groups if found.step == step else ())
        groups, left_out = rows.groups(recorded, limit)
        num_bytes = self._files.write(step, [*groups, *others], left_out=left_out)
        removed = self._files.shrink(limit)
        log.debug("step %d texts of %d and %d groups, %d bytes", step, len(groups), len(others), num_bytes)
        if removed:
            log.debug("token records of steps %s removed: diagnostics.token_records_mb is full", removed)
