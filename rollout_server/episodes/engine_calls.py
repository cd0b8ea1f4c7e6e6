"""Calls to the engines of a fleet: which worker samples, and another one when that one dies.

A call goes to the worker that its affinity names (the group of the episode), so that turns meet the KV cache of those
before them, as long as that worker is ready and its weights are new enough. One that was lost with its worker is
submitted again: nothing of it was recorded.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bapo.core.errors import BapoError, UnavailableError
from rollout_server.calls import Finished
from rollout_server.engines.base import Completed, Completion

log = logging.getLogger(__name__)

COLLECT_S = 1.0
"""Long poll of one collection."""
POLL_S = 0.1
"""Between two looks for a ready worker."""


class EngineHandle(Protocol):
    """What is needed of a worker's handle."""

    def submit(self, completions: Sequence[Completion]) -> None:
        """Begin calls; returns immediately."""
        ...

    def collect(self, wait_s: float) -> list[Finished]:
        """Finished calls. Raises: UnavailableError when the worker has died; TimeoutError."""
        ...

    def abort(self, call_ids: Sequence[str]) -> None:
        """Stop sampling calls; returns immediately."""
        ...


@dataclass(frozen=True, slots=True)
class ReadyWorker:
    """A worker that may be called."""

    worker_id: str
    policy_version: int
    handle: EngineHandle


class EngineCalls:
    """Used in one event loop."""

    def __init__(self, ready: Callable[[], list[ReadyWorker]]) -> None:
        """`ready`: the workers that may be called now; must return quickly."""
        self._ready = ready
        self._workers: dict[str, _WorkerCalls] = {}

    async def generate(self, completion: Completion, *, affinity: str, min_version: int, timeout_s: float) -> Completed:
        """Sample. Cancelling it aborts the call.

        Raises: ContractError for what the engine refuses; UnavailableError without a worker until the timeout.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            worker = await self._worker(affinity, min_version, deadline)
            try:
                return await worker.call(completion)
            except WorkerLostError as error:
                log.warning("call %s is submitted again: %s", completion.call_id, error)

    def close(self) -> None:
        """Collect nothing more."""
        for worker in self._workers.values():
            worker.close()

    async def _worker(self, affinity: str, min_version: int, deadline: float) -> _WorkerCalls:
        while True:
            ready = {found.worker_id: found for found in self._ready() if found.policy_version >= min_version}
            for worker_id in [name for name, calls in self._workers.items() if calls.is_lost]:
                del self._workers[worker_id]
            if ready:
                names = sorted(ready)
                chosen = ready[names[zlib.crc32(affinity.encode()) % len(names)]]
                if chosen.worker_id not in self._workers:
                    self._workers[chosen.worker_id] = _WorkerCalls(chosen)
                return self._workers[chosen.worker_id]
            if time.monotonic() > deadline:
                raise UnavailableError(f"no worker with version {min_version} is ready")
            await asyncio.sleep(POLL_S)


class WorkerLostError(UnavailableError):
    """The worker of a call has died before it finished."""


class _WorkerCalls:
    """The open calls of one worker, and the thread that collects them."""

    def __init__(self, worker: ReadyWorker) -> None:
        self._handle, self._name = worker.handle, worker.worker_id
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, asyncio.Future[Completed]] = {}
        self._closed = threading.Event()
        self.is_lost = False
        threading.Thread(target=self._collect, name=f"collect-{self._name}", daemon=True).start()

    async def call(self, completion: Completion) -> Completed:
        """Raises: WorkerLostError; the call's own error."""
        if self.is_lost:
            raise WorkerLostError(f"{self._name} has died")
        future: asyncio.Future[Completed] = self._loop.create_future()
        self._open[completion.call_id] = future
        try:
            self._handle.submit([completion])
            return await future
        except asyncio.CancelledError:
            self._handle.abort([completion.call_id])
            raise
        finally:
            self._open.pop(completion.call_id, None)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _collect(self) -> None:
        while not self._closed.is_set():
            try:
                found = self._handle.collect(COLLECT_S)
            except Exception as error:  # noqa: BLE001 - of a worker that has died, or does not respond
                if self._closed.is_set():  # the workers stop after us
                    return
                log.warning("calls of %s are lost: %s", self._name, error)
                self._later(self._lose, str(error))
                return
            if found:
                self._later(self._settle, found)

    def _later(self, function: Callable[..., None], argument: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)

    def _settle(self, found: list[Finished]) -> None:
        for call_id, result in found:
            future = self._open.get(call_id)
            if future is None or future.done():
                continue
            if isinstance(result, UnavailableError):
                future.set_exception(WorkerLostError(str(result)))
            elif isinstance(result, BapoError):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _lose(self, reason: str) -> None:
        self.is_lost = True
        for future in self._open.values():
            if not future.done():
                future.set_exception(WorkerLostError(f"{self._name}: {reason}"))
