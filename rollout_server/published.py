"""The newest weights, remembered for the next life of the rollout server.

A fleet that was killed would otherwise wait for the learner's next update, and the learner may be waiting for groups
that only the present weights may sample: both would wait for ever.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Protocol

from bapo.errors import BapoError, ContractError, WeightMismatchError
from bapo.fleet_client import weight_update_from_map, weight_update_map
from bapo.storage import replace_file, storing
from bapo.types import Progress, WeightUpdate
from rollout_server.weights import check_size

log = logging.getLogger(__name__)

FILE_NAME = "published.json"


class Buffer(Protocol):
    """Where the learner says which version the workers have."""

    def progress(self) -> Progress: ...


def remember(folder: Path, update: WeightUpdate) -> None:
    """Write down the newest update, beside the weights. Raises: StorageError."""
    path = folder / FILE_NAME
    with storing(path):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(weight_update_map(update)).encode())


def recall(folder: Path, buffer: Buffer) -> WeightUpdate | None:
    """What the fleet had before it died; None when nothing was published, or it is not of the run as it is now."""
    path = folder / FILE_NAME
    if not path.exists():
        return None
    try:
        update = weight_update_from_map(json.loads(path.read_text()))
        check_size(update)
        if buffer.progress().policy_version == 0:
            log.info("%s is of an earlier attempt at this run: workers begin with the base model", path)
            return None
    except (ValueError, ContractError, WeightMismatchError) as error:
        log.warning("workers wait for the next weights, because the newest ones cannot be taken again: %s", error)
        return None
    except BapoError as error:
        log.warning("workers wait for the next weights: the buffer does not say how far the run is: %s", error)
        return None
    log.info("workers begin with version %d, which the fleet had before", update.version)
    return update
