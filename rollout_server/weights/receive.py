"""Verify a weight update in a worker: the file is the learner's, and the engine uses its weights.

learner writes file, digest, canary --POST /weights--> fleet --> each worker:
    1 the file's sha256 equals the digest        else WeightMismatchError; the engine still has its old weights
      (a host that cannot read the learner's file fetches a copy: relay.py, host_cache.py)
    2 the engine replaces its weights in place   between two steps of the engine
    3 the engine's log-probs equal the canary    else WeightMismatchError; the engine must not sample again
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from pathlib import Path

import numpy as np

from bapo.core.errors import ContractError, WeightMismatchError, WeightsAbsentError
from bapo.core.token_arrays import Float32s
from bapo.core.types import Canary, WeightUpdate
from rollout_server.engines.base import Engine

log = logging.getLogger(__name__)


def check_file(update: WeightUpdate) -> None:
    """Raises: WeightMismatchError if the file is missing, truncated, or not the one the learner wrote."""
    check_size(update)
    with Path(update.path).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != update.digest:
        raise WeightMismatchError(
            f"weights of version {update.version}: {update.path} has sha256 {digest[:16]}..., "
            f"the learner announced {update.digest[:16]}...; it was modified after it was written"
        )


def can_be_read(path: str | Path) -> bool:
    """Whether this process can read a file. `is_file` raises for a parent folder without permission and for an invalid
    name."""
    try:
        return Path(path).is_file() and os.access(path, os.R_OK)
    except (OSError, ValueError):
        return False


def check_size(update: WeightUpdate) -> None:
    """Check only that a file of the announced size exists. Raises: WeightMismatchError; WeightsAbsentError."""
    path = Path(update.path)
    if not can_be_read(path):
        raise WeightsAbsentError(f"weights of version {update.version}: {path} is not readable on this host")
    size = path.stat().st_size
    if size != update.num_bytes:
        raise WeightMismatchError(
            f"weights of version {update.version}: {path} has {size} bytes, the learner announced {update.num_bytes}"
        )


def load_verified(engine: Engine, update: WeightUpdate) -> None:
    """Steps 2 and 3, in the thread that owns the engine; step 1 runs outside of it, while the engine samples.

    Raises: WeightMismatchError; after any exception the engine must not sample.
    """
    began = time.monotonic()
    engine.load_weights(update.path, update.version)
    loaded = time.monotonic()
    difference = check_canary(update.canary, engine.logprobs(update.canary.token_ids), update.version)
    log.info(
        "loaded weights version=%d load_s=%.3f canary_s=%.3f canary_difference=%.2e",
        update.version,
        loaded - began,
        time.monotonic() - loaded,
        difference,
    )


def check_canary(canary: Canary, logprobs: Float32s | None, version: int) -> float:
    """Largest difference in nats between the engine's and the learner's log-probs; 0 without weights.

    Raises: ContractError if the canary is inconsistent; WeightMismatchError beyond the tolerance.
    """
    if logprobs is None:
        return 0.0
    expected = np.asarray(canary.logprobs, np.float32)
    if len(expected) != len(canary.token_ids) - 1 or len(logprobs) != len(expected):
        raise ContractError(
            f"canary of version {version}: {len(canary.token_ids)} tokens need {len(canary.token_ids) - 1} log-probs; "
            f"got {len(expected)} from the learner, {len(logprobs)} from the engine"
        )
    difference = float(np.abs(logprobs - expected).max(initial=0.0))
    if not difference <= canary.tolerance:  # also true for NaN
        raise WeightMismatchError(
            f"after the update to version {version} the engine's log-probs differ from the learner's by "
            f"{difference:.3g} nats, more than {canary.tolerance:g}: the engine does not have these weights"
        )
    return difference
