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

from bapo.config.tree import Config
from bapo.errors import BapoError, ConfigError, DeadlineError, StaleWeightsError, UnavailableError
from bapo.fleet_client import WorkerStatus
from bapo.telemetry import Telemetry
from bapo.types import WeightUpdate
from rollout_server.fleet_metrics import FleetMetrics
from rollout_server.handles import MakeHandle
from rollout_server.place import Place
from rollout_server.weights import check_size

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
