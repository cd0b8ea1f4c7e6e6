"""One place of the fleet: a worker, and after its death the next one.

The whole life of a worker is one straight function, `_live`, in the place's own thread. Any error there ends the
worker, never the place. A place that cannot even bury its worker ends the fleet: nobody else would miss it.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from bapo.config.tree import Config
from bapo.errors import BY_NAME, BapoError, DeadlineError, UnavailableError
from bapo.fleet_client import WorkerStatus
from bapo.types import WeightUpdate
from rollout_server.handles import MakeHandle, WorkerHandle
from rollout_server.memory import MemoryWatch
from rollout_server.report import WorkerReport

if TYPE_CHECKING:
    from rollout_server.fleet import Fleet

log = logging.getLogger(__name__)

POLL_S = 0.25
"""Between two looks at a worker that loads."""
WATCH_S = 1.0
"""Between two looks at one that samples: each costs some milliseconds on both sides."""
SILENCE_S = 30.0
"""A ready worker that does not answer for this long hangs: it is replaced."""
STUCK_S = 120.0
"""So does an engine whose single step takes this long."""
EARLY_S = 30.0
"""A worker that dies sooner than this after it was ready, without a delivered group, died early."""
JOIN_S = 5.0
NO_REPORT = WorkerReport(state="loading", policy_version=0, inflight=0, tokens_per_s=0.0, pid=0, rss_bytes=0)


class Place:
    """Keeps one worker alive until it is told to leave."""

    def __init__(self, index: int, fleet: Fleet, config: Config, make_handle: MakeHandle) -> None:
        self.index = index
        self.name = f"worker-{index}"
        self.worker_id = fleet.prefix + self.name
        self._fleet = fleet
        self._config = config
        self._make_handle = make_handle
        self._handle: WorkerHandle | None = None
        self._state = "starting"
        self._restarts = 0
        self._report = NO_REPORT
        self._condemned: Exception | None = None
        self._ready_at = 0.0
        self._leaving = threading.Event()
        self._at_once = False
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def leave(self, *, at_once: bool = False) -> None:
        """Drain the worker, or kill it at once; the place then ends."""
        self._at_once = self._at_once or at_once
        self._leaving.set()

    def join(self) -> None:
        """Wait for the end of a place that leaves at once."""
        self._thread.join(JOIN_S)

    @property
    def is_leaving(self) -> bool:
        """Scaled away."""
        return self._leaving.is_set()

    @property
    def is_ready(self) -> bool:
        """Samples, and must get every update."""
        return self._state == "ready"

    def status(self) -> WorkerStatus:
        """For people and for `GET /workers`."""
        report = self._report
        return WorkerStatus(
            worker_id=self.worker_id,
            state=self._state,
            policy_version=report.policy_version,
            tokens_per_s=report.tokens_per_s,
            inflight=report.inflight,
            restarts=self._restarts,
            pid=report.pid,
            rss_bytes=report.rss_bytes,
            num_groups=report.num_stored,
            num_tokens=report.num_tokens,
            num_failed=report.num_failed,
        )

    def update_weights(self, update: WeightUpdate) -> float | None:
        """Seconds until the worker held them; None when it did not take them and is being replaced."""
        handle = self._handle
        assert handle is not None, "a ready place has a worker"
        try:
            seconds = handle.update_weights(update, self._config.rollout.sync_timeout_s)
        except Exception as error:  # noqa: BLE001 - whatever it was, this worker must not sample again
            log.warning("%s did not take version %d: %s", self.worker_id, update.version, error)
            if handle is self._handle:
                self._condemned, self._state = error, "dead"
            return None
        self._report = replace(self._report, policy_version=update.version)
        return seconds

    def _run(self) -> None:
        try:
            self._keep_one_alive()
        except Exception as error:  # a thread that dies of a bug must end the fleet
            log.exception("the place of %s has failed", self.worker_id)
            self._state = "dead"
            self._fleet.stop_with(BapoError(f"the place of {self.worker_id} has failed: {error!r}"))

    def _keep_one_alive(self) -> None:
        while not self._leaving.is_set() and self._fleet.fatal is None:
            name = self._fleet.prefix + self.name
            self.worker_id = name if self._restarts == 0 else f"{name}.{self._restarts}"
            self._report, self._condemned, self._ready_at = NO_REPORT, None, 0.0
            self._state = "starting"
            memory = MemoryWatch.begin()
            handle = self._handle = None
            try:
                handle = self._handle = self._make_handle(self.worker_id)
                self._live(handle)
            except Exception as error:  # noqa: BLE001 - the fleet decides what an error means
                self._bury(handle, memory.explain(error, rss_bytes=self._report.rss_bytes))
            else:
                handle.kill()
                self._fleet.release(self.worker_id)
        self._state = "dead"
        self._fleet.metrics.forget(self.name)
        if self._leaving.is_set():
            self._fleet.gone(self)

    def _live(self, handle: WorkerHandle) -> None:
        """From start to the end of its drain. Raises: whatever ended it otherwise."""
        self._fleet.release(self.worker_id)  # of a worker of this name in an earlier life of the fleet
        handle.start()
        if not self._wait_loaded(handle):
            return
        self._fleet.admit(lambda update: self._begin(handle, update))
        log.info("%s is ready with version %d", self.worker_id, self._report.policy_version)
        while not self._leaving.wait(WATCH_S):
            self._look(handle, SILENCE_S)
        if not self._at_once:
            self._state = "draining"
            handle.drain(self._config.rollout.drain_s)

    def _wait_loaded(self, handle: WorkerHandle) -> bool:
        """Whether it has loaded; False when the place is to leave. Raises: DeadlineError, or what stopped it."""
        limit_s = self._config.rollout.start_timeout_s
        deadline = time.monotonic() + limit_s
        while not self._leaving.wait(POLL_S):
            try:
                self._look(handle, POLL_S)
            except TimeoutError:
                log.debug("%s is too busy loading to answer", self.worker_id)
            if self._report.state == "loaded":
                return True
            if time.monotonic() > deadline:
                tail = handle.log_tail()
                raise DeadlineError(
                    f"{self.worker_id} was not ready after {limit_s:.0f} s (rollout.start_timeout_s)"
                    + (f"; its last lines:\n{tail}" if tail else "; it has written nothing: is there room for it?")
                )
        return False

    def _begin(self, handle: WorkerHandle, update: WeightUpdate | None) -> None:
        handle.begin(update, self._config.rollout.sync_timeout_s)
        self._look(handle, SILENCE_S)
        self._ready_at = time.monotonic()
        self._state = "ready"

    def _look(self, handle: WorkerHandle, timeout_s: float) -> None:
        """Take a report. Raises: what the worker died of; TimeoutError when it is silent or its engine is stuck."""
        if self._condemned is not None:
            raise self._condemned
        report = handle.report(timeout_s)
        self._report = report
        self._fleet.metrics.observe(self.name, self._state, report)
        if report.state == "failed":
            known = BY_NAME.get(report.error)
            raise known(report.message) if known else UnavailableError(f"{report.error}: {report.message}")
        if report.stuck_s > STUCK_S:
            raise TimeoutError(f"one step of the engine has taken {report.stuck_s:.0f} s")

    def _bury(self, handle: WorkerHandle | None, error: Exception) -> None:
        """`handle`: None when it could not even be made."""
        self._state = "dead"
        log.warning("%s died: %s: %s", self.worker_id, type(error).__name__, error)
        tail = handle.log_tail() if handle else ""
        if handle:
            handle.kill()
        self._fleet.release(self.worker_id)
        self._restarts += 1
        lived_s = time.monotonic() - self._ready_at if self._ready_at else 0.0
        early = self._report.num_stored == 0 and lived_s < EARLY_S
        self._leaving.wait(self._fleet.died(self.worker_id, error, early=early, log_tail=tail))
