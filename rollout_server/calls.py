"""Calls of an engine from another process: what is submitted is collected when it has finished, several at a time.

    front --submit--> Sampler (the engine's thread) --> finished --collect, a long poll--> front

Two methods instead of one that waits: an actor has few threads, and episodes have hundreds of calls open.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial

from bapo.core.errors import BapoError, UnavailableError
from rollout_server.engines.base import Completed, Completion
from rollout_server.sampler import Sampler

Finished = tuple[str, Completed | BapoError]
"""Id of a call, and its result or why there is none."""


class Calls:
    """The calls of one engine. Thread-safe."""

    def __init__(self, sampler: Sampler, on_finished: Callable[[Completion, Completed], None]) -> None:
        """`on_finished`: called with each call that has a result, in the engine's thread."""
        self._sampler, self._on_finished = sampler, on_finished
        self._finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._futures: dict[str, Future[Completed]] = {}

    def submit(self, completions: Sequence[Completion]) -> None:
        """Begin calls; returns immediately."""
        for completion in completions:
            future = self._sampler.generate(completion)
            self._futures[completion.call_id] = future
            future.add_done_callback(partial(self._finish, completion))

    def abort(self, call_ids: Sequence[str]) -> None:
        """Stop sampling these calls, which are not collected; unknown ids are ignored."""
        for call_id in call_ids:
            if (future := self._futures.get(call_id)) is not None:
                future.cancel()

    def collect(self, wait_s: float) -> list[Finished]:
        """What has finished since the last call; waits for the first."""
        deadline, found = time.monotonic() + wait_s, list[Finished]()
        while True:
            try:
                found.append(self._finished.get(timeout=0.0 if found else max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                return found

    def _finish(self, completion: Completion, future: Future[Completed]) -> None:
        call_id = completion.call_id
        self._futures.pop(call_id, None)
        try:
            result = future.result()
        except CancelledError:
            return
        except BapoError as error:
            self._finished.put((call_id, error))
        except Exception as error:  # noqa: BLE001 - its caller must hear of it
            self._finished.put((call_id, UnavailableError(f"{type(error).__name__}: {error}")))
        else:
            self._on_finished(completion, result)
            self._finished.put((call_id, result))
