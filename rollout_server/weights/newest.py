"""The newest weights, noted beside them for the next life of the rollout server, and for the others of the run.

A fleet that was killed would otherwise wait for the learner's next update, and the learner may be waiting for groups
that only the present weights may sample: both would wait for ever.

Of several rollout servers the learner talks to one, whichever answers under the name that it was given. That one writes
the note; the others look at it (`Follower`). A worker that has not got the newest weights yet is given no request that
needs them, so the learner need not wait for all.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from bapo.core.errors import BapoError, ContractError, WeightMismatchError
from bapo.core.types import Progress, WeightUpdate
from bapo.runtime.run_directory.files import replace_file, storing
from bapo.transport.rollout_client import weight_update_from_map, weight_update_map
from rollout_server.weights.receive import check_size

log = logging.getLogger(__name__)

FILE_NAME = "published.json"
LOOK_S = 0.5
"""Between two looks at the note of others."""
Follow = Callable[[Callable[[], WeightUpdate | None]], bool]


class Buffer(Protocol):
    """Where the learner says which version the workers have."""

    def progress(self) -> Progress: ...


def remember(folder: Path, update: WeightUpdate) -> None:
    """Write down the newest update, beside the weights. Raises: StorageError."""
    path = folder / FILE_NAME
    with storing(path):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(weight_update_map(update)).encode())


def noted(folder: Path, buffer: Buffer) -> WeightUpdate | None:
    """What the note says; None when nothing was published, or it is of an earlier attempt at this run.

    Raises: ValueError, ContractError for a damaged note; what the buffer raises.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return None
    update = weight_update_from_map(json.loads(path.read_text()))
    return update if buffer.progress().policy_version > 0 else None


def recall(folder: Path, buffer: Buffer) -> WeightUpdate | None:
    """What the fleet had before it died; None when nothing was published, or it is not of the run as it is now.

    Raises: UnavailableError when the buffer does not say how far the run is.
    """
    try:
        update = noted(folder, buffer)
        if update is None:
            log.info("no weights were published in this run yet: workers begin with the base model")
            return None
        check_size(update)
    except (ValueError, ContractError, WeightMismatchError) as error:
        log.warning("workers wait for the next weights, because the newest ones cannot be taken again: %s", error)
        return None
    log.info("workers begin with version %d, which the fleet had before", update.version)
    return update


class Follower:
    """Looks at the note in a thread of its own; `follow` is the fleet's."""

    def __init__(self, folder: Path, buffer: Buffer, follow: Follow) -> None:
        self._folder, self._buffer, self._follow = folder, buffer, follow
        self._taken = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follow", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; a look that goes on may finish."""
        self._ended.set()

    def look(self) -> None:
        """One look. The same note is not read twice, unless it could not be followed."""
        path = self._folder / FILE_NAME
        changed = path.stat().st_mtime_ns if path.exists() else 0
        if changed == self._taken:
            return
        try:
            if self._follow(lambda: noted(self._folder, self._buffer)):
                self._taken = changed
        except (OSError, ValueError, BapoError) as error:
            log.debug("the note is looked at again: %s", error)

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                self.look()
            except Exception:  # a bug here must not leave workers on old weights for good
                log.exception("the note is looked at again")
