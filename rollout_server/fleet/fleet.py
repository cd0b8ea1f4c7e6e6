"""The fleet: as many workers as are wanted, each replaced when it dies, all with the newest weights.

    Place ("worker-0") --> [ own thread: start a worker, watch it, replace it ] --> WorkerHandle --> Worker

    a place's worker:  starting --loaded, newest weights taken--> ready --scale down--> draining --> gone
                          |                                        |
                          +------- died, hung, or refused an update: leases released, a new worker starts

Invariant: no worker claims anything before it holds the newest published weights (`_weights_lock`).

As long as one worker samples, the others are started again and again, with growing pauses. When none does, the fleet
stops with one message: the configuration cannot work (ConfigError), a worker was not ready in time (DeadlineError), or
`MAX_DEATHS` workers in a row died early (UnavailableError).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from bapo.config.tree import Config
from bapo.core.errors import BY_NAME, BapoError, ConfigError, DeadlineError, StaleWeightsError, UnavailableError
from bapo.core.types import WeightUpdate
from bapo.runtime.metrics.server import Telemetry
from bapo.transport.rollout_client import WorkerStatus
from rollout_server.fleet.metrics import FleetMetrics
from rollout_server.fleet.out_of_memory import MemoryWatch
from rollout_server.fleet.worker_handle import MakeHandle, WorkerHandle
from rollout_server.weights.receive import check_size
from rollout_server.worker_report import WorkerReport

log = logging.getLogger(__name__)

MAX_DEATHS = 3
LONGEST_PAUSE_S = 30.0
"""Between two starts of a worker that keeps dying."""


def checked(update: WeightUpdate) -> WeightUpdate:
    """The update as it is, where every worker reads the learner's own file. Raises: WeightMismatchError."""
    check_size(update)
    return update


class Fleet:
    """Thread-safe. `on_fatal` is told once, from a place's thread, that the fleet cannot go on."""

    def __init__(
        self,
        config: Config,
        *,
        make_handle: MakeHandle,
        release: Callable[[str], object],
        telemetry: Telemetry,
        on_fatal: Callable[[BapoError], None],
        remember: Callable[[WeightUpdate], None] = lambda _: None,
        prefix: str = "",
        locate: Callable[[WeightUpdate], WeightUpdate] = checked,
    ) -> None:
        """
        Args:
            release: gives the leases of a dead worker back to the buffer.
            remember: keeps the newest weights for a fleet that comes after this one, or stands beside it.
            locate: finds the file of an update here, and says where other hosts fetch it.
            prefix: what the ids of its workers begin with, where the run has several fleets.
        """
        self._config = config
        self._make_handle = make_handle
        self._release = release
        self.metrics = FleetMetrics(telemetry, config.task.name)
        self._on_fatal = on_fatal
        self._remember = remember
        self.prefix = prefix
        self._locate = locate
        self._places_lock = threading.Lock()
        self._places: list[Place] = []
        self._is_ended = False
        self._weights_lock = threading.Lock()
        self._newest: WeightUpdate | None = None
        self._deaths = 0
        self.fatal: BapoError | None = None

    def scale(self, num: int) -> None:
        """Want `num` workers; returns at once. Raises: ConfigError outside 1..rollout.max_workers."""
        most = self._config.rollout.max_workers
        if not 1 <= num <= most:
            raise ConfigError(f"the number of workers must be 1 to {most} (rollout.max_workers), got {num}")
        with self._places_lock:
            if self._is_ended:
                return
            staying = [place for place in self._places if not place.is_leaving]
            for place in staying[num:]:
                place.leave()
            for _ in range(num - len(staying)):
                place = Place(self._free_index(), self, self._config, self._make_handle)
                self._places.append(place)
                place.start()

    @property
    def num_wanted(self) -> int:
        """Workers that should be there."""
        with self._places_lock:
            return sum(not place.is_leaving for place in self._places)

    @property
    def newest(self) -> WeightUpdate | None:
        """The newest published weights."""
        return self._newest

    def statuses(self) -> list[WorkerStatus]:
        """All workers, by place."""
        with self._places_lock:
            places = list(self._places)
        return [place.status() for place in places]

    def readiness(self) -> str:
        """Empty when at least one worker samples, else why none does."""
        if self.fatal is not None:
            return f"the fleet has stopped: {self.fatal}"
        statuses = self.statuses()
        if any(status.state == "ready" for status in statuses):
            return ""
        return "no worker is ready: " + (", ".join(f"{s.worker_id} is {s.state}" for s in statuses) or "none started")

    def update_weights(self, update: WeightUpdate, *, rollback: bool = False) -> dict[str, float]:
        """Give all ready workers new weights, side by side; those that fail are replaced and do not block.

        Args:
            rollback: accept an older version than the newest.
        Returns: worker id -> seconds, of those that hold the weights now.
        Raises: StaleWeightsError; WeightMismatchError when the file cannot be what the learner wrote.
        """
        update = self._locate(update)
        with self._weights_lock:
            newest = self._newest
            if newest is not None and update.version < newest.version and not rollback:
                raise StaleWeightsError(
                    f"version {update.version} is older than version {newest.version}, which the workers have; "
                    "a learner that resumed from a checkpoint says so (rollback)"
                )
            self._remember(update)
            return self._give(update)

    def follow(self, noted: Callable[[], WeightUpdate | None]) -> bool:
        """Take what another fleet of the run was given, which may also be older: a learner has resumed.

        Args:
            noted: reads the note that all of them write. It is read here, so that no update comes between: an update
                of our own is in the note before anybody reads it.
        Returns: whether that is what the workers have now; False when nothing is noted.
        Raises: WeightMismatchError when the file is gone; what `noted` raises.
        """
        with self._weights_lock:
            update = noted()
            if update is None:
                return False
            update = self._locate(update)
            if update != self._newest:
                self._give(update)
            return True

    def _give(self, update: WeightUpdate) -> dict[str, float]:
        """To all ready workers, side by side; the weights' lock is held."""
        began = time.monotonic()
        self._newest = update
        with self._places_lock:
            places = [place for place in self._places if place.is_ready]
        with ThreadPoolExecutor(max_workers=max(1, len(places)), thread_name_prefix="update") as pool:
            seconds = list(pool.map(lambda place: place.update_weights(update), places))
        took = {place.worker_id: s for place, s in zip(places, seconds, strict=True) if s is not None}
        self.metrics.updated(
            time.monotonic() - began, num_bytes=update.num_bytes * len(took), num_failed=len(places) - len(took)
        )
        log.info("version %d published: %d of %d workers hold it", update.version, len(took), len(places))
        return took

    def begin_with(self, update: WeightUpdate) -> None:
        """Weights of an earlier fleet, for workers that start now; an update that came meanwhile is newer.

        Raises: WeightMismatchError when the file is gone.
        """
        update = self._locate(update)
        with self._weights_lock:
            self._newest = self._newest or update

    def stop(self) -> None:
        """End all workers now; their leases go back, and no further ones start."""
        with self._places_lock:
            self._is_ended = True
            places = list(self._places)
        for place in places:
            place.leave(at_once=True)
        for place in places:
            place.join()

    # -- what a place tells the fleet

    def admit(self, begin: Callable[[WeightUpdate | None], None]) -> None:
        """Let a loaded worker begin with the newest weights; none can be published meanwhile."""
        with self._weights_lock:
            begin(self._newest)

    def died(self, worker_id: str, error: Exception, *, early: bool, log_tail: str) -> float:
        """A worker is dead; stops the fleet when there is no hope.

        Args:
            early: it had neither delivered a group nor lived for long.
        Returns: seconds to wait before the next one starts.
        """
        self.metrics.restarts.inc()
        self._deaths = self._deaths + 1 if early else 0
        if not any(status.state == "ready" for status in self.statuses()):
            if isinstance(error, ConfigError | DeadlineError):
                self.stop_with(error)
            elif self._deaths >= MAX_DEATHS:
                shown = f"; its last lines:\n{log_tail}" if log_tail else ""
                self.stop_with(
                    UnavailableError(f"{self._deaths} rollout workers in a row died early. {worker_id}: {error}{shown}")
                )
        return float(min(LONGEST_PAUSE_S, 2 ** (self._deaths - 1)))

    def stop_with(self, error: BapoError) -> None:
        """The fleet cannot go on; only the first reason counts."""
        if self.fatal is None:
            self.fatal = error
            self._on_fatal(error)

    def release(self, worker_id: str) -> None:
        """Give the leases of a dead worker back, or leave them to end by themselves."""
        try:
            self._release(worker_id)
        except BapoError as error:
            log.warning("the leases of %s were not released, they will end by themselves: %s", worker_id, error)

    def gone(self, place: Place) -> None:
        """A place has ended for good."""
        with self._places_lock:
            self._places.remove(place)

    def _free_index(self) -> int:
        taken = {place.index for place in self._places}
        return next(i for i in range(len(taken) + 1) if i not in taken)


# One place of the fleet: a worker, and after its death the next one.
#
# The whole life of a worker is one straight function, `_live`, in the place's own thread. Any error there ends the
# worker, never the place. A place that cannot even bury its worker ends the fleet: nobody else would miss it.

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
