"""The newest weight update, recorded in RUN/weights for a restarted rollout server and for the others of the run.

A restarted fleet must not wait for the learner's next update: the learner may be waiting for groups that only the
current weights may sample.

Of several rollout servers the learner calls one, which writes the record; the others poll it (`Follower`). A worker
without the newest weights gets no request that needs them, so the learner need not wait for all workers.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from bapo.core.errors import BapoError, ContractError, WeightMismatchError
from bapo.core.json_values import from_map, to_map
from bapo.core.types import WeightUpdate
from bapo.runtime.run_directory.files import replace_file, storing
from bapo.transport.buffer_client import BufferClient
from rollout_server.weights.receive import check_size

log = logging.getLogger(__name__)

FILE_NAME = "published.json"
POLL_S = 0.5
"""Poll interval of the record."""
Follow = Callable[[Callable[[], WeightUpdate | None]], bool]


def remember(folder: Path, update: WeightUpdate) -> None:
    """Record the newest update. Raises: StorageError."""
    path = folder / FILE_NAME
    with storing(path):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(to_map(update)).encode())


def noted(folder: Path, buffer: BufferClient) -> WeightUpdate | None:
    """The recorded update; None if nothing was published, or the record is from an earlier attempt of this run.

    Raises: ValueError, ContractError for a damaged record; errors of the buffer.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return None
    update = from_map(json.loads(path.read_text()), WeightUpdate, "weight update")
    return update if buffer.progress().policy_version > 0 else None


def recall(folder: Path, buffer: BufferClient) -> WeightUpdate | None:
    """The last update before a restart; None if there is none, or it is unusable.

    Raises: UnavailableError if the buffer does not report the learner's progress.
    """
    try:
        update = noted(folder, buffer)
        if update is None:
            log.info("no weights published in this run yet: workers start with the base model")
            return None
        check_size(update)
    except (ValueError, ContractError, WeightMismatchError) as error:
        log.warning("workers wait for the next weights: the recorded ones are unusable: %s", error)
        return None
    log.info("workers start with version %d, recorded by the previous fleet", update.version)
    return update


class Follower:
    """Polls the record in its own thread; `follow` is `Fleet.follow`."""

    def __init__(self, folder: Path, buffer: BufferClient, follow: Follow) -> None:
        self._folder, self._buffer, self._follow = folder, buffer, follow
        self._taken = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follow", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling; a poll in progress may finish."""
        self._ended.set()

    def poll(self) -> None:
        """Poll once. A record is loaded once, unless loading failed."""
        path = self._folder / FILE_NAME
        changed = path.stat().st_mtime_ns if path.exists() else 0
        if changed == self._taken:
            return
        try:
            if self._follow(lambda: noted(self._folder, self._buffer)):
                self._taken = changed
        except (OSError, ValueError, BapoError) as error:
            log.debug("polling the weights record failed, retrying: %s", error)

    def _run(self) -> None:
        while not self._ended.wait(POLL_S):
            try:
                self.poll()
            except Exception:  # a bug must not leave the workers on old weights
                log.exception("polling the weights record failed, retrying")
