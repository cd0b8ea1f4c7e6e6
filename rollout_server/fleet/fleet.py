"""The fleet: keeps the target number of workers running, each with the newest weights.

    WorkerSlot ("worker-0") --> [ own thread: start a worker, poll it, restart it ] --> WorkerHandle --> Worker

    starting --loaded, has the newest weights--> ready --scale down--> draining --> removed
       |                                           |
       +---- died, hung, or failed an update: leases released, a new worker starts

Invariant: no worker claims before it has the newest published weights (`_weights_lock`). It loads them before it takes
that lock, so that the learner's next update does not wait for it.

While at least one worker samples, dead ones are restarted with exponential backoff. If none does, the fleet fails: with
ConfigError for an invalid configuration, DeadlineError for a worker that was not ready in time, or UnavailableError
after `MAX_DEATHS` consecutive early deaths.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from bapo.config.tree import Config
from bapo.core.errors import (
    BY_NAME,
    BapoError,
    ConfigError,
    ContractError,
    DeadlineError,
    StaleWeightsError,
    UnavailableError,
    WeightsAbsentError,
)
from bapo.core.types import WeightTransfer, WeightUpdate
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
"""Maximum backoff between two starts of a worker that keeps dying."""
POLL_S = 0.25
"""Poll interval of a loading worker."""
WATCH_S = 1.0
"""Poll interval of a ready worker: a report costs a few milliseconds on both sides."""
EARLY_S = 30.0
"""A worker that dies sooner than this after it was ready, without a delivered group, died early."""
REPORT_TIMEOUT_S = 30.0
"""A ready worker that does not report its state for this long is restarted."""
JOIN_S = 5.0
NO_REPORT = WorkerReport(state="loading", policy_version=0, inflight=0, tokens_per_s=0.0, pid=0, rss_bytes=0)


def checked(update: WeightUpdate) -> WeightUpdate:
    """The unchanged update: every worker reads the learner's file. Raises: WeightMismatchError."""
    check_size(update)
    return update


class Fleet:
    """Thread-safe. `on_fatal` is called once, in a slot's thread, when the fleet has failed."""

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
            release: releases the leases of a dead worker.
            remember: records the newest weights for a restarted fleet, and for other fleets of the run.
            prefix: prefix of worker ids, if the run has several fleets.
            locate: sets the path of an update's file on this host, and its URL for other hosts.
        """
        self._config = config
        self._make_handle = make_handle
        self._release = release
        self.metrics = FleetMetrics(telemetry, config.task.name)
        self._on_fatal = on_fatal
        self._remember = remember
        self.prefix = prefix
        self._locate = locate
        self._slots_lock = threading.Lock()
        self._slots: list[WorkerSlot] = []
        self._is_ended = False
        self._weights_lock = threading.Lock()
        self._newest: WeightUpdate | None = None
        self._deaths = 0
        self.fatal: BapoError | None = None

    def scale(self, num: int) -> None:
        """Set the number of workers; returns immediately. Raises: ConfigError outside 1..rollout.max_workers."""
        most = self._config.rollout.max_workers
        if not 1 <= num <= most:
            raise ConfigError(f"the number of workers must be 1 to {most} (rollout.max_workers), got {num}")
        with self._slots_lock:
            if self._is_ended:
                return
            staying = [slot for slot in self._slots if not slot.is_leaving]
            for slot in staying[num:]:
                slot.leave()
            for _ in range(num - len(staying)):
                slot = WorkerSlot(self._free_index(), self, self._config, self._make_handle)
                self._slots.append(slot)
                slot.start()

    @property
    def num_wanted(self) -> int:
        """The target number of workers."""
        with self._slots_lock:
            return sum(not slot.is_leaving for slot in self._slots)

    @property
    def newest(self) -> WeightUpdate | None:
        """The newest published weights."""
        return self._newest

    def statuses(self) -> list[WorkerStatus]:
        """All workers, by slot."""
        with self._slots_lock:
            slots = list(self._slots)
        return [slot.status() for slot in slots]

    def ready_workers(self) -> list[tuple[str, int, WorkerHandle]]:
        """Id, policy version and handle of each worker that samples."""
        with self._slots_lock:
            slots = list(self._slots)
        return [found for slot in slots if (found := slot.ready_worker()) is not None]

    def readiness(self) -> str:
        """Empty if at least one worker samples, else the reason."""
        if self.fatal is not None:
            return f"the fleet has failed: {self.fatal}"
        statuses = self.statuses()
        if any(status.state == "ready" for status in statuses):
            return ""
        return "no worker is ready: " + (", ".join(f"{s.worker_id} is {s.state}" for s in statuses) or "none started")

    def update_weights(self, update: WeightUpdate, *, rollback: bool = False) -> dict[str, float]:
        """Send weights to all ready workers in parallel; those that fail are restarted and do not block.

        Args:
            rollback: accept an older version than the newest.
        Returns: worker id -> seconds, of the workers that have the weights.
        Raises: StaleWeightsError; WeightMismatchError if the file is not the announced one.
        """
        update = self._locate(update)
        with self._weights_lock:
            if not rollback:
                self._refuse_older(update.version)
            self._remember(update)
            return self._send(update)

    def transfer_weights(self, transfer: WeightTransfer) -> dict[str, float]:
        """Have these workers receive weights from the learner's GPU, in parallel.

        Workers that start later, and those that decline, load the file, which is announced as an update. Those that
        fail, or have not verified the weights in time, are restarted.

        Returns: worker id -> seconds, of the workers that have the weights.
        Raises: ContractError if other workers are ready than these: all ranks must join; StaleWeightsError.
        """
        with self._weights_lock:
            self._refuse_older(transfer.version)
            with self._slots_lock:
                slots = [slot for slot in self._slots if slot.is_ready]
            if {slot.worker_id for slot in slots} != set(transfer.workers):
                raise ContractError(f"ready workers are {sorted(slot.worker_id for slot in slots)}, not these")
            return self._in_parallel(slots, lambda slot: slot.transfer_weights(transfer))

    def follow(self, noted: Callable[[], WeightUpdate | None]) -> bool:
        """Load the update that another fleet of the run has recorded; it may be older after a resume.

        Args:
            noted: reads the record. Called under the weights lock, so that no update of this fleet comes in between.
        Returns: whether the workers have the recorded update; False without a record.
        Raises: WeightMismatchError if the file is missing; errors of `noted`.
        """
        with self._weights_lock:
            update = noted()
            if update is None:
                return False
            update = self._locate(update)
            if update != self._newest:
                self._send(update)
            return True

    def _send(self, update: WeightUpdate) -> dict[str, float]:
        """Send to all ready workers in parallel. The caller must hold the weights lock."""
        began = time.monotonic()
        self._newest = update
        with self._slots_lock:
            slots = [slot for slot in self._slots if slot.is_ready]
        took = self._in_parallel(slots, lambda slot: slot.update_weights(update))
        self.metrics.updated(
            time.monotonic() - began, num_bytes=update.num_bytes * len(took), num_failed=len(slots) - len(took)
        )
        log.info("version %d published: %d of %d workers have it", update.version, len(took), len(slots))
        return took

    def _refuse_older(self, version: int) -> None:
        """Raises: StaleWeightsError."""
        newest = self._newest
        if newest is not None and version < newest.version:
            raise StaleWeightsError(
                f"version {version} is older than version {newest.version}, which the workers already have; "
                "set rollback=true after a resume from a checkpoint"
            )

    @staticmethod
    def _in_parallel(slots: list[WorkerSlot], load: Callable[[WorkerSlot], float | None]) -> dict[str, float]:
        with ThreadPoolExecutor(max_workers=max(1, len(slots)), thread_name_prefix="update") as pool:
            seconds = list(pool.map(load, slots))
        return {slot.worker_id: s for slot, s in zip(slots, seconds, strict=True) if s is not None}

    def begin_with(self, update: WeightUpdate) -> None:
        """Start workers with recorded weights, unless an update has arrived meanwhile.

        Raises: WeightMismatchError if the file is missing.
        """
        update = self._locate(update)
        with self._weights_lock:
            self._newest = self._newest or update

    def stop(self) -> None:
        """Kill all workers and release their leases; none start after this."""
        with self._slots_lock:
            self._is_ended = True
            slots = list(self._slots)
        for slot in slots:
            slot.leave(at_once=True)
        for slot in slots:
            slot.join()

    # -- called by slots

    def admit(self, load: Callable[[WeightUpdate], None], begin: Callable[[WeightUpdate | None], None]) -> None:
        """Call `load` with the newest weights, then `begin` with the same, while none are published.

        Loading takes minutes for a large model on another host, so updates do not wait for it.
        """
        update = None
        while (newest := self._newest) is not update and newest is not None:
            update = newest
            try:
                load(update)
            except WeightsAbsentError:  # two newer updates, and the learner deletes the file
                if self._newest is update:
                    raise
        with self._weights_lock:
            begin(self._newest)

    def died(self, worker_id: str, error: Exception, *, early: bool, log_tail: str) -> float:
        """Count a dead worker; fails the fleet if no worker can start.

        Args:
            early: it died within `EARLY_S` and without a delivered group.
        Returns: seconds to wait before the restart.
        """
        self.metrics.restarts.inc()
        self._deaths = self._deaths + 1 if early else 0
        if not any(status.state == "ready" for status in self.statuses()):
            if isinstance(error, ConfigError | DeadlineError):
                self.stop_with(error)
            elif self._deaths >= MAX_DEATHS:
                shown = f"; end of its log:\n{log_tail}" if log_tail else ""
                self.stop_with(
                    UnavailableError(f"{self._deaths} rollout workers in a row died early. {worker_id}: {error}{shown}")
                )
        return float(min(LONGEST_PAUSE_S, 2 ** (self._deaths - 1)))

    def stop_with(self, error: BapoError) -> None:
        """Fail the fleet; only the first error counts."""
        if self.fatal is None:
            self.fatal = error
            self._on_fatal(error)

    def release(self, worker_id: str) -> None:
        """Release the leases of a dead worker; if that fails, they expire."""
        try:
            self._release(worker_id)
        except BapoError as error:
            log.warning("could not release the leases of %s, they will expire: %s", worker_id, error)

    def remove(self, slot: WorkerSlot) -> None:
        """Remove a slot that has ended."""
        with self._slots_lock:
            self._slots.remove(slot)

    def _free_index(self) -> int:
        taken = {slot.index for slot in self._slots}
        return next(i for i in range(len(taken) + 1) if i not in taken)


class WorkerSlot:
    """Keeps one worker running until `leave`. An error kills the worker, never the slot."""

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
        self._update_error: Exception | None = None
        self._ready_at = 0.0
        self._leaving = threading.Event()
        self._at_once = False
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def leave(self, *, at_once: bool = False) -> None:
        """Drain or kill the worker and end the slot."""
        self._at_once = self._at_once or at_once
        self._leaving.set()

    def join(self) -> None:
        """Wait for the end of the slot."""
        self._thread.join(JOIN_S)

    @property
    def is_leaving(self) -> bool:
        """Whether it was scaled down."""
        return self._leaving.is_set()

    @property
    def is_ready(self) -> bool:
        """Whether its worker samples and must receive every update."""
        return self._state == "ready"

    def status(self) -> WorkerStatus:
        """The worker, for `GET /workers`."""
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
            waiting_for=report.waiting_for,
        )

    def ready_worker(self) -> tuple[str, int, WorkerHandle] | None:
        """Its worker, while that samples."""
        handle = self._handle
        if not self.is_ready or handle is None:
            return None
        return self.worker_id, self._report.policy_version, handle

    def update_weights(self, update: WeightUpdate) -> float | None:
        """Returns: seconds; None when the worker failed and is being restarted."""
        return self._receive(update.version, lambda handle, limit_s: handle.update_weights(update, limit_s))

    def transfer_weights(self, transfer: WeightTransfer) -> float | None:
        """Returns: seconds; None when the worker declined, or failed and is being restarted."""
        return self._receive(transfer.version, lambda handle, limit_s: handle.transfer_weights(transfer, limit_s))

    def _receive(self, version: int, load: Callable[[WorkerHandle, float], float | None]) -> float | None:
        handle = self._handle
        assert handle is not None, "a ready slot has a worker"
        try:
            seconds = load(handle, self._config.rollout.sync_timeout_s)
        except Exception as error:  # noqa: BLE001 - after any error this worker must not sample
            log.warning("%s failed to load version %d: %s", self.worker_id, version, error)
            if handle is self._handle:
                self._update_error, self._state = error, "dead"
            return None
        if seconds is not None:
            self._report = replace(self._report, policy_version=version)
        return seconds

    def _run(self) -> None:
        try:
            self._restart_until_leaving()
        except Exception as error:  # a bug in a slot must fail the fleet
            log.exception("the slot of %s failed", self.worker_id)
            self._state = "dead"
            self._fleet.stop_with(BapoError(f"the slot of {self.worker_id} failed: {error!r}"))

    def _restart_until_leaving(self) -> None:
        while not self._leaving.is_set() and self._fleet.fatal is None:
            name = self._fleet.prefix + self.name
            self.worker_id = name if self._restarts == 0 else f"{name}.{self._restarts}"
            self._report, self._update_error, self._ready_at = NO_REPORT, None, 0.0
            self._state = "starting"
            memory = MemoryWatch.begin()
            handle = self._handle = None
            try:
                handle = self._handle = self._make_handle(self.worker_id)
                self._run_worker(handle)
            except Exception as error:  # noqa: BLE001 - the fleet decides what an error means
                self._handle_death(handle, memory.explain(error, rss_bytes=self._report.rss_bytes))
            else:
                handle.kill()
                self._fleet.release(self.worker_id)
        self._state = "dead"
        self._fleet.metrics.forget(self.name)
        if self._leaving.is_set():
            self._fleet.remove(self)

    def _run_worker(self, handle: WorkerHandle) -> None:
        """From start to drain. Raises: the error that ended the worker."""
        self._fleet.release(self.worker_id)  # leases of this worker id from before a restart of the fleet
        handle.start()
        if not self._wait_loaded(handle):
            return
        self._fleet.admit(lambda update: self._load(handle, update), lambda update: self._begin(handle, update))
        log.info("%s is ready with version %d", self.worker_id, self._report.policy_version)
        while not self._leaving.wait(WATCH_S):
            self._poll(handle, REPORT_TIMEOUT_S)
        if not self._at_once:
            self._state = "draining"
            handle.drain(self._config.rollout.drain_s)

    def _wait_loaded(self, handle: WorkerHandle) -> bool:
        """Whether it has loaded; False if the slot is leaving. Raises: DeadlineError; the worker's error."""
        limit_s = self._config.rollout.start_timeout_s
        deadline = time.monotonic() + limit_s
        while not self._leaving.wait(POLL_S):
            try:
                self._poll(handle, POLL_S)
            except TimeoutError:
                log.debug("%s is too busy loading to respond", self.worker_id)
            if self._report.state == "loaded":
                return True
            if time.monotonic() > deadline:
                tail = handle.log_tail()
                raise DeadlineError(
                    f"{self.worker_id} was not ready after {limit_s:.0f} s (rollout.start_timeout_s)"
                    + (f"; end of its log:\n{tail}" if tail else "; its log is empty: are resources available?")
                )
        return False

    def _load(self, handle: WorkerHandle, update: WeightUpdate) -> None:
        handle.update_weights(update, self._config.rollout.sync_timeout_s)

    def _begin(self, handle: WorkerHandle, update: WeightUpdate | None) -> None:
        """The worker usually has these weights: only an update since the last look of `Fleet.admit` is loaded now."""
        handle.begin(update, self._config.rollout.sync_timeout_s)
        if update is not None:
            self._report = replace(self._report, policy_version=update.version)
        self._ready_at = time.monotonic()
        self._state = "ready"

    def _poll(self, handle: WorkerHandle, timeout_s: float) -> None:
        """Poll a report. Raises: the worker's error; TimeoutError if it does not respond or its engine is stuck."""
        if self._update_error is not None:
            raise self._update_error
        report = handle.report(timeout_s)
        self._report = report
        self._fleet.metrics.observe(self.name, self._state, report)
        if report.state == "failed":
            known = BY_NAME.get(report.error)
            raise known(report.message) if known else UnavailableError(f"{report.error}: {report.message}")
        if report.stuck_s > self._config.rollout.engine_step_timeout_s:
            raise TimeoutError(f"the engine is stuck in a step for {report.stuck_s:.0f} s")

    def _handle_death(self, handle: WorkerHandle | None, error: Exception) -> None:
        """`handle`: None if it could not be created."""
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
