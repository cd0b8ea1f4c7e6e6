"""The fleet's interface to a worker, in threads of this process or in a Ray actor.

    start --> report().state == "loaded" --> begin --> report, update_weights, ... --> drain --> kill

`LocalHandle` runs a worker as threads of this process, for the scripted engine. `RayHandle` is in `ray_node.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from bapo.config.tree import Config
from bapo.core.errors import UnavailableError
from bapo.core.types import WeightTransfer, WeightUpdate
from bapo.tasks.grading.pool import GraderPool
from bapo.transport.buffer_client import BufferClient
from rollout_server.calls import Finished
from rollout_server.delivery import NUM_GRADERS
from rollout_server.engines.base import Completion, engine_module
from rollout_server.images import ImageSource
from rollout_server.rollouts.segment_files import FOLDER
from rollout_server.worker import Worker
from rollout_server.worker_report import WorkerReport

log = logging.getLogger(__name__)

LOG_TAIL_LINES = 20


class WorkerDiedError(UnavailableError):
    """The worker's process has ended."""


class WorkerHandle(Protocol):
    """One worker. Called by its slot's thread; `update_weights` also by the thread that publishes."""

    def start(self) -> None:
        """Start loading; returns immediately."""
        ...

    def report(self, timeout_s: float) -> WorkerReport:
        """State and counts. Raises: WorkerDiedError; TimeoutError if it does not respond."""
        ...

    def begin(self, update: WeightUpdate | None, timeout_s: float) -> None:
        """Load the newest weights and start claiming. Raises: as `update_weights`."""
        ...

    def update_weights(self, update: WeightUpdate, timeout_s: float) -> float:
        """Returns: seconds. Raises: the worker's error; WorkerDiedError; TimeoutError."""
        ...

    def transfer_weights(self, transfer: WeightTransfer, timeout_s: float) -> float | None:
        """Returns: seconds; None if it declined, and samples with its old weights. Raises: as `update_weights`."""
        ...

    def submit(self, completions: Sequence[Completion]) -> None:
        """Begin calls for agents; returns immediately, an error shows in `collect`."""
        ...

    def collect(self, wait_s: float) -> list[Finished]:
        """Calls that have finished since the last time. Raises: WorkerDiedError, TimeoutError."""
        ...

    def abort(self, call_ids: Sequence[str]) -> None:
        """Stop sampling calls; returns immediately."""
        ...

    def drain(self, timeout_s: float) -> None:
        """Finish the groups in flight, until the timeout. Raises: WorkerDiedError, TimeoutError."""
        ...

    def kill(self) -> None:
        """Kill it immediately, in any state; never raises."""
        ...

    def log_tail(self) -> str:
        """The last lines of its own log; empty without one."""
        ...


MakeHandle = Callable[[str], WorkerHandle]
"""Worker id -> handle of a new worker."""


def make_worker(
    worker_id: str,
    config: Config,
    buffer_url: str,
    token: str | None = None,
    *,
    run_path: Path | None = None,
    server_url: str = "",
) -> Worker:
    """A worker with the buffer client, engine and graders of the configuration.

    Args:
        token: API token; None: the process's own.
        run_path: run directory, for images and partial rollouts; None: they are not stored.
        server_url: URL of the rollout server, for images that this host cannot read.
    """
    engine = engine_module(config.rollout.engine)
    images = ImageSource(config, run_path, server_url, token)
    return Worker(
        worker_id=worker_id,
        config=config,
        buffer=BufferClient(buffer_url, token=token),
        make_engine=lambda config: engine.make_engine(config, worker_id),
        make_tokenization=lambda config: engine.make_tokenization(config, images.read),
        make_grader=lambda config: GraderPool(config.task, num_children=NUM_GRADERS),
        token=token,
        segments=None if run_path is None else run_path / FOLDER,
        images=images,
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
            except Exception:  # the report has the error
                log.debug("%s failed to load", self._worker.worker_id, exc_info=True)

        threading.Thread(target=load, name=f"load-{self._worker.worker_id}", daemon=True).start()

    def report(self, timeout_s: float) -> WorkerReport:
        """The worker's report."""
        return self._worker.report()

    def begin(self, update: WeightUpdate | None, timeout_s: float) -> None:
        """In the calling thread."""
        self._worker.begin(update)

    def update_weights(self, update: WeightUpdate, timeout_s: float) -> float:
        """In the calling thread."""
        return self._worker.update_weights(update)

    def transfer_weights(self, transfer: WeightTransfer, timeout_s: float) -> float | None:
        """In the calling thread."""
        return self._worker.transfer_weights(transfer)

    def submit(self, completions: Sequence[Completion]) -> None:
        """To the worker's engine."""
        self._worker.calls.submit(completions)

    def collect(self, wait_s: float) -> list[Finished]:
        """Raises: UnavailableError when the worker has stopped."""
        if self._worker.is_over:
            raise UnavailableError(f"{self._worker.worker_id} has stopped")
        return self._worker.calls.collect(wait_s)

    def abort(self, call_ids: Sequence[str]) -> None:
        """In the worker's engine."""
        self._worker.calls.abort(call_ids)

    def drain(self, timeout_s: float) -> None:
        """In the calling thread."""
        self._worker.drain(timeout_s)

    def kill(self) -> None:
        """Stop the worker: threads cannot be killed."""
        self._worker.stop()

    def log_tail(self) -> str:
        """Empty: it logs with this process."""
        return ""
