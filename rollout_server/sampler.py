"""The thread that owns an engine: submissions, engine steps and weight updates run there, one at a time.

    worker.py --submit, abort, call--> inbox --> [ thread: empty the inbox, step the engine ] --> listener.sampled
                                                                                       next: worker.py, delivery.py

A weight update is thus atomic between two steps, without a lock. It may wait until the engine has nothing to sample:
what is submitted after it then waits too, and responses keep the KV cache of the weights that began them.

An exception of the engine ends the thread: `died` is called once, and every pending and later call fails. A caller may
cancel its future, as asyncio does when a client hangs up: work that has not begun is not run, work that has begun ends,
and the thread continues.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from bapo.core.errors import ContractError, UnavailableError
from bapo.core.types import RolloutRequest
from rollout_server.engines.base import INITIAL_VERSION, Engine, Occupancy, SampledGroup

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Listener(Protocol):
    """Callbacks of the sampling thread; they must return quickly."""

    def sampled(self, group: SampledGroup) -> None:
        """A group is finished."""

    def refused(self, request_id: str, error: ContractError) -> None:
        """The engine cannot sample this request."""

    def died(self, error: BaseException) -> None:
        """The engine is dead; its groups are lost."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A function to run between two steps."""

    function: Callable[[Engine], Any]
    future: Future[Any]
    reads: bool
    """It changes nothing in the engine, so its error is its caller's alone."""
    latest: float
    """Monotonic time until which it waits for an engine without groups; what follows it waits too."""


class Sampler:
    """Runs an engine. All methods may be called from any thread."""

    def __init__(self, make_engine: Callable[[], Engine], listener: Listener) -> None:
        self._make_engine = make_engine
        self._listener = listener
        self._inbox: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._held: _Work | None = None
        """Work that waits for an engine without groups; it was the first of the inbox."""
        self._stopping = False
        self._ready: Future[None] = Future()
        self._lock = threading.Lock()
        self._dead: BaseException | None = None
        self._version = INITIAL_VERSION
        self._occupancy = Occupancy()
        self._step_began: float | None = None
        # The thread also creates the engine: torch keeps some settings per thread.
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        """Create the engine and wait for it. Raises: any error of its creation."""
        self._thread.start()
        self._ready.result()

    @property
    def policy_version(self) -> int:
        """Version of the engine's weights."""
        return self._version

    @property
    def occupancy(self) -> Occupancy:
        """Load of the engine after its last step."""
        return self._occupancy

    @property
    def stuck_s(self) -> float:
        """Seconds that the current step of the engine has taken; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def submit(self, request: RolloutRequest) -> None:
        """Start sampling a group; the listener receives the result."""

        def begin(engine: Engine) -> None:
            try:
                engine.submit(request, request.max_response_tokens)
            except ContractError as error:
                self._refuse(request.request_id, error)

        self.call(begin)

    def abort(self, request_id: str) -> None:
        """Stop sampling a group, without a callback."""
        self.call(lambda engine: engine.abort(request_id))

    def call(self, function: Callable[[Engine], Result], *, reads: bool = False, wait_s: float = 0.0) -> Future[Result]:
        """Run `function` between two steps. If it raises, the engine is dead, unless `function` only reads.

        Args:
            wait_s: longest time that it, and all that is submitted or called after it, waits for the groups in the
                engine.

        Returns: its result. Cancelled before it began, `function` is not run; afterwards it cannot be cancelled.
        """
        work = _Work(function, Future(), reads, time.monotonic() + wait_s)
        with self._lock:
            if self._dead is None:
                self._inbox.put(work)
            else:
                work.future.set_exception(self._lost())
        return cast("Future[Result]", work.future)

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its current step; returns whether it ended in time."""
        self._stopping = True
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            engine = self._make_engine()
        except BaseException as error:  # noqa: BLE001 - `start` raises it in its caller's thread
            self._die(error)
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        try:
            while self._do_inbox(engine):
                self._step(engine)
        except BaseException as error:  # engines raise anything, also SystemExit; the worker must fail
            log.exception("the engine died")
            self._die(error)
            self._listener.died(error)
        else:
            self._die(UnavailableError("the worker was stopped"))
        finally:
            engine.close()

    def _do_inbox(self, engine: Engine) -> bool:
        """Run all pending work; blocks while the engine has nothing to sample. Returns: False to stop."""
        while engine.num_sampling == 0 or self._held or not self._inbox.empty():
            work = self._held or self._inbox.get()
            if work is None:
                return False
            self._held = work if self._must_wait(work, engine) else None
            if self._held:
                return True
            if not work.future.set_running_or_notify_cancel():  # from here on it cannot be cancelled
                continue
            try:
                result = work.function(engine)
            except BaseException as error:  # the caller waits for the future
                work.future.set_exception(error)
                if work.reads and isinstance(error, Exception):
                    continue
                raise
            self._version = engine.policy_version
            work.future.set_result(result)
        return True

    def _must_wait(self, work: _Work, engine: Engine) -> bool:
        return engine.num_sampling > 0 and not self._stopping and time.monotonic() < work.latest

    def _step(self, engine: Engine) -> None:
        self._step_began = time.monotonic()
        groups = engine.step()
        self._step_began = None
        self._occupancy = engine.occupancy
        for group in groups:
            try:
                self._listener.sampled(group)
            except Exception as error:  # of one group: the engine and the other groups are as they were
                log.exception("group %s was sampled, but could not be passed on", group.request_id)
                self._refuse(group.request_id, ContractError(f"{type(error).__name__}: {error}"))

    def _refuse(self, request_id: str, error: ContractError) -> None:
        try:
            self._listener.refused(request_id, error)
        except Exception:  # as above
            log.exception("group %s: the failure could not be reported", request_id)

    def _die(self, error: BaseException) -> None:
        with self._lock:
            self._dead = error
            pending, self._held = [self._held], None
            while not self._inbox.empty():
                pending.append(self._inbox.get())
            for work in pending:
                if work is not None and work.future.set_running_or_notify_cancel():
                    work.future.set_exception(self._lost())

    def _lost(self) -> UnavailableError:
        return UnavailableError(f"the engine is dead: {type(self._dead).__name__}: {self._dead}")
