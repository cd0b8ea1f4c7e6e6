"""How the fleet holds a worker: the same few calls, whether it is a thread here or a Ray actor elsewhere.

    start --> report().state == "loaded" --> begin --> report, update_weights, ... --> drain --> kill

`LocalHandle` runs a worker as threads of this process: for engines that cost nothing (scripted). The actor's handle is
in `fleet_ray.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from bapo.config.tree import Config
from bapo.core.errors import UnavailableError
from bapo.core.types import WeightUpdate
from bapo.tasks.grading.pool import GraderPool
from bapo.transport.buffer_client import BufferClient
from rollout_server.engines.base import engine_module
from rollout_server.partial_rollouts import FOLDER
from rollout_server.worker import NUM_GRADERS, Worker
from rollout_server.worker_report import WorkerReport

log = logging.getLogger(__name__)

LOG_TAIL_LINES = 20


class WorkerDiedError(UnavailableError):
    """The worker's process is gone."""


class WorkerHandle(Protocol):
    """One worker. Calls from one place's thread, `update_weights` also from the one that publishes."""

    def start(self) -> None:
        """Begin to load; returns at once."""
        ...

    def report(self, timeout_s: float) -> WorkerReport:
        """How it is. Raises: WorkerDiedError; TimeoutError when it does not answer."""
        ...

    def begin(self, update: WeightUpdate | None, timeout_s: float) -> None:
        """Take the newest weights and start to claim. Raises: as `update_weights`."""
        ...

    def update_weights(self, update: WeightUpdate, timeout_s: float) -> float:
        """Returns: seconds. Raises: what the worker raised; WorkerDiedError; TimeoutError."""
        ...

    def drain(self, timeout_s: float) -> None:
        """Finish what is in flight, as far as the time allows. Raises: WorkerDiedError, TimeoutError."""
        ...

    def kill(self) -> None:
        """End it now, whatever state it is in; never raises."""
        ...

    def log_tail(self) -> str:
        """Its last lines of output; empty when it has no log of its own."""
        ...


MakeHandle = Callable[[str], WorkerHandle]
"""A handle for a new worker of the given id."""


def make_worker(
    worker_id: str, config: Config, buffer_url: str, token: str | None = None, *, run_path: Path | None = None
) -> Worker:
    """A worker with its real parts.

    Args:
        token: for the services; None: what this process has.
        run_path: run directory, where groups in segments are kept; None: nowhere.
    """
    return Worker(
        worker_id=worker_id,
        config=config,
        buffer=BufferClient(buffer_url, token=token),
        make_engine=engine_module(config.rollout.engine).make_engine,
        make_grader=lambda config: GraderPool(config.task, num_children=NUM_GRADERS),
        token=token,
        segments=None if run_path is None else run_path / FOLDER,
    )


class LocalHandle:
    """A worker as threads of this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def start(self) -> None:
        """Load in a thread; an error shows in the report."""

        def load() -> None:
            try:
                self._worker.load()
            except Exception:  # the report has the error; the thread's own traceback would only repeat it
                log.debug("%s did not load", self._worker.worker_id, exc_info=True)

        threading.Thread(target=load, name=f"load-{self._worker.worker_id}", daemon=True).start()

    def report(self, timeout_s: float) -> WorkerReport:
        """Threads always answer."""
        return self._worker.report()

    def begin(self, update: WeightUpdate | None, timeout_s: float) -> None:
        """In the calling thread."""
        self._worker.begin(update)

    def update_weights(self, update: WeightUpdate, timeout_s: float) -> float:
        """In the calling thread."""
        return self._worker.update_weights(update)

    def drain(self, timeout_s: float) -> None:
        """In the calling thread."""
        self._worker.drain(timeout_s)

    def kill(self) -> None:
        """Threads cannot be killed: the worker is asked to stop."""
        self._worker.stop()

    def log_tail(self) -> str:
        """It logs with this process."""
        return ""
