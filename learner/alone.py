"""One learner per run: one that is started while another still lives would train the same batches beside it.

Both would append to the same records, write the same checkpoints and take turns with the workers' weights. On one
machine the launcher sees to it; a pod on a host that was lost, or a second start by hand, has nobody else.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from bapo.errors import UnavailableError
from bapo.storage import storing

log = logging.getLogger(__name__)

FILE_NAME = ".learner.lock"
PATIENCE_S = 60.0
"""For the end of one that was killed just now, also where it takes a file server so long to hear of it."""
POLL_S = 0.2


@contextmanager
def alone(run: Path, *, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Be the only learner of a run in this block; the kernel gives the lock back however we end.

    Args:
        patience_s: how long to wait for the end of another.
    Raises: UnavailableError when it lives on; StorageError.
    """
    path = run / FILE_NAME
    with storing(path):
        file = path.open("a")
    with file:
        deadline = time.monotonic() + patience_s
        if not _is_ours(file):
            log.warning("another learner trains %s: waiting for its end, at most %.0f s", run, patience_s)
            while not _is_ours(file):
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"another learner still trains {run}, after {patience_s:.0f} s: end it, then start this one "
                        "again"
                    )
                time.sleep(POLL_S)
        yield


def _is_ours(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        log.warning("this file system has no locks (%s), so nothing keeps a second learner away", error.strerror)
    return True
