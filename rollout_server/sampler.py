"""The thread that owns an engine: calls, engine steps and weight updates run there, one at a time.

    rollouts/ --generate--> inbox --> [ thread: empty the inbox, step the engine ] --> Future[Completed]
    worker.py --call------>

A weight update is thus atomic between two steps, without a lock. It may wait until the engine has nothing to sample:
what is called after it then waits too, and responses keep the KV cache of the weights that began them.

An exception of the engine ends the thread: it becomes the exception of `ended`, and every pending and later call fails.
A caller may cancel its future, as asyncio does when a client hangs up: work that has not begun is not run, sampling is
aborted, other work that has begun ends, and the thread continues.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from bapo.core.errors import ContractError, UnavailableError
from rollout_server.engines.base import INITIAL_VERSION, Completed, Completion, Engine, Occupancy

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Work:
    """A function to run between two steps."""

    function: Callable[[Engine], Any]
    future: Future[Any]
    latest: float
    """Monotonic time until which it waits for an engine without calls; what follows it waits too."""


class Sampler:
    """Runs an engine. All methods may be called from any thread."""

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._make_engine = make_engine
        self.ended: Future[None] = Future()
        """Done when a started thread has ended; its exception is what the engine died of."""
        self._sampling: dict[str, Future[Completed]] = {}
        self._busy_at = 0.0
        self._inbox: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._held: _Work | None = None
        """Work that waits for an engine without calls; it was the first of the inbox."""
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

    @property
    def idle_s(self) -> float:
        """Seconds since the engine had something to sample; 0 while it has."""
        return 0.0 if self._sampling or not self._inbox.empty() else time.monotonic() - self._busy_at

    def generate(self, completion: Completion) -> Future[Completed]:
        """Sample. Cancelling the future aborts it. Its exceptions: ContractError from the engine; UnavailableError."""
        call_id, future = completion.call_id, Future[Completed]()

        def begin(engine: Engine) -> None:
            if future.cancelled():
                return
            self._sampling[call_id] = future  # before `add`: if that kills the engine, the call fails with it
            try:
                engine.add(completion)
            except ContractError as error:
                del self._sampling[call_id]
                _settle(future, error)

        def abort(engine: Engine) -> None:
            if self._sampling.get(call_id) is future:
                del self._sampling[call_id]
                engine.abort(call_id)

        self.call(begin).add_done_callback(lambda _: _settle(future, self._lost()) if self._dead else None)
        future.add_done_callback(lambda _: self.call(abort) if future.cancelled() else None)
        return future

    def call(self, function: Callable[[Engine], Result], *, wait_s: float = 0.0) -> Future[Result]:
        """Run `function` between two steps. If it raises, the engine is dead.

        Args:
            wait_s: longest time that it, and all that is called after it, waits for the calls in the engine.

        Returns: its result. Cancelled before it began, `function` is not run; afterwards it cannot be cancelled.
        """
        work = _Work(function, Future(), time.monotonic() + wait_s)
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
            self.ended.set_exception(error)
        else:
            self._die(UnavailableError("the worker was stopped"))
            self.ended.set_result(None)
        finally:
            engine.close()

    def _do_inbox(self, engine: Engine) -> bool:
        """Run all pending work; blocks while the engine has nothing to sample. Returns: False to stop."""
        while not self._sampling or self._held or not self._inbox.empty():
            work = self._held or self._inbox.get()
            if work is None:
                return False
            self._held = work if self._must_wait(work) else None
            if self._held:
                return True
            if not work.future.set_running_or_notify_cancel():  # from here on it cannot be cancelled
                continue
            try:
                result = work.function(engine)
            except BaseException as error:  # the caller waits for the future
                work.future.set_exception(error)
                raise
            self._version = engine.policy_version
            work.future.set_result(result)
        return True

    def _must_wait(self, work: _Work) -> bool:
        if self._stopping or work.future.cancelled() or time.monotonic() >= work.latest:
            return False
        return not all(future.cancelled() for future in self._sampling.values())

    def _step(self, engine: Engine) -> None:
        self._step_began = self._busy_at = time.monotonic()
        finished = engine.step()
        self._step_began = None
        self._occupancy = engine.occupancy
        for completed in finished:
            if (future := self._sampling.pop(completed.call_id, None)) is not None:
                _settle(future, completed)

    def _die(self, error: BaseException) -> None:
        with self._lock:
            self._dead = error
            pending, self._held = [self._held], None
            while not self._inbox.empty():
                pending.append(self._inbox.get())
            for work in pending:
                if work is not None:
                    _settle(work.future, self._lost())
            for future in self._sampling.values():
                _settle(future, self._lost())

    def _lost(self) -> UnavailableError:
        return UnavailableError(f"the engine is dead: {type(self._dead).__name__}: {self._dead}")


def _settle(future: Future[Any], result: Any) -> None:
    """Set the result, or an exception, of a future that is neither done nor cancelled."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
