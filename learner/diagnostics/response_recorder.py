"""Write texts and token records while training continues: a step is handed over, a thread writes its file.

    batch t is here --expect--> queue --thread--> ask the buffer for the groups that t does not train
    step t is done  --put-----> queue --thread--> decode, extract, write RUN/token_records, remove the oldest

Nothing that happens here ends or delays a run: a step that comes while two wait is left out with a warning, a
disk that refuses ends the recording and not the training, and a user's `extract` that hangs holds up this thread alone.
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
from learner.diagnostics.token_values import Float32s, TokenValues

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
    """One per run, on the rank that writes records. The thread starts with the first step that is recorded."""

    def __init__(self, config: Config, files: TokenFiles, untrained: Untrained | None = None) -> None:
        """`untrained`: None where no buffer is: what a file has of such groups stays in it."""
        self._config = config
        self._files = files
        self._untrained = untrained
        self._queue: queue.SimpleQueue[int | Recorded | None] = queue.SimpleQueue()
        """Steps that are expected, then the same steps with what became of them; None: the end."""
        self._room = threading.Semaphore(MAX_WAITING)
        self._newest = 0
        self._thread: threading.Thread | None = None
        self._failed = False

    def expect(self, step: int) -> None:
        """The batch of a step is here: request now the groups that it does not train, because its checkpoint may
        release them. Returns at once."""
        if not self._failed and self._untrained is not None and self._keeps_texts(step):
            self._newest = step
            self._start()
            self._queue.put(step)

    def put(self, batch: Batch, values: TokenValues | None, advantage_M: Float32s | None = None) -> None:
        """Hand one step over; returns at once. `values`: None for text alone, where that is due."""
        if self._failed or (values is None and not self._keeps_texts(batch.step)):
            return
        self._start()
        if not self._room.acquire(blocking=False):
            log.warning("step %d has no token record: %d steps wait to be written", batch.step, MAX_WAITING)
            return
        advantage_M = advantage_M if values is None else values.advantage_M
        self._queue.put(Recorded(batch=batch, values=values, advantage_M=advantage_M))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait for what was handed over, at most this long."""
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("token records: the last steps are not written after %.0f s", timeout_s)

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
            # The end of a thread of its own: a bug here ends the recording and says so, and never the training.
            self._failed = True
            log.exception("token records end, training continues: %s", type(error).__name__)

    def _serve_all(self) -> None:
        rows, found = RowMaker(self._config), Found(step=0, groups=())
        while (what := self._queue.get()) is not None:
            if isinstance(what, int):
                # One that others have overtaken is released by now, or its step is left out.
                found = self._ask(what) if what > self._newest - MAX_WAITING else found
                continue
            self._room.release()
            try:
                self._write(what, rows, found)
            except BapoError as error:
                self._failed = True
                log.warning("token records end at step %d, training continues: %s", what.batch.step, error)
                return

    def _ask(self, step: int) -> Found:
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
