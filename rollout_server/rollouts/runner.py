"""The event loop of a worker's rollout programs: one task per request.

A program that raises fails its own request alone; one whose engine is dead ends silently, since the worker fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from bapo.core.errors import BapoError, UnavailableError
from bapo.core.types import RolloutRequest
from rollout_server.rollouts.base import Rollout, RolloutProgram
from rollout_server.tokenization import Tokenization

log = logging.getLogger(__name__)


class RolloutRunner:
    """Runs programs in a thread of its own. All methods may be called from any thread."""

    def __init__(
        self,
        program: RolloutProgram,
        tokenization: Tokenization,
        *,
        on_rollout: Callable[[Rollout], None],
        on_failure: Callable[[RolloutRequest, Exception], None],
    ) -> None:
        """The callbacks are called in the event loop, so they must return quickly."""
        self._program, self._tokenization = program, tokenization
        self._on_rollout, self._on_failure = on_rollout, on_failure
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="rollouts", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        self._started.result()

    def submit(self, request: RolloutRequest) -> None:
        """Begin a request."""
        self._call(self._begin, request)

    def cancel(self, request_id: str) -> None:
        """Stop sampling a request, without a callback; unknown ids are ignored."""
        self._call(self._cancel, request_id)

    def stop(self, timeout_s: float) -> None:
        """Cancel all requests, and join the thread until the timeout."""
        if self._thread.ident is not None:
            self._call(self._ended.set)
            self._thread.join(timeout_s)

    async def _main(self) -> None:
        self._started.set_result(asyncio.get_running_loop())
        await self._ended.wait()

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has stopped
            self._started.result().call_soon_threadsafe(function, *arguments)

    def _begin(self, request: RolloutRequest) -> None:
        self._tasks[request.request_id] = asyncio.get_running_loop().create_task(self._run(request))

    def _cancel(self, request_id: str) -> None:
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    async def _run(self, request: RolloutRequest) -> None:
        try:
            self._on_rollout(self._with_texts(await self._program.run(request)))
        except UnavailableError as error:
            log.debug("group %s was not sampled: %s", request.request_id, error)
        except Exception as error:  # of one group: the engine and the other groups are as they were
            if not isinstance(error, BapoError):
                log.exception("group %s could not be sampled", request.request_id)
            self._on_failure(request, error)
        finally:
            if self._tasks.get(request.request_id) is asyncio.current_task():  # not when it was claimed again
                del self._tasks[request.request_id]

    def _with_texts(self, rollout: Rollout) -> Rollout:
        sequences = list(rollout.sequences)
        unread = [i for i, sequence in enumerate(sequences) if sequence.text is None]
        if unread:
            texts = self._tokenization.decode([sequences[i].token_ids.tolist() for i in unread])
            for i, text in zip(unread, texts, strict=True):
                sequences[i] = replace(sequences[i], text=text)
        return replace(rollout, sequences=tuple(sequences))
