"""Verify a weight update in a worker: the file is the learner's, and the engine uses its weights.

learner writes file, digest, canary --POST /weights--> fleet --> each worker:
    1 the file's digest is the announced one     else WeightMismatchError; the engine still has its old weights
      (a host that cannot read the learner's file fetches a copy: relay.py, host_cache.py)
    2 the engine replaces its weights in place   between two steps of the engine
      and its kernels agree with what arrived    (engines/_kernel_probe.py) else WeightMismatchError
    3 the engine's log-probs agree (canary.py)   else WeightMismatchError; the engine must not sample again
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from bapo.core.errors import WeightMismatchError, WeightsAbsentError
from bapo.core.types import WeightTransfer, WeightUpdate
from bapo.runtime.file_digest import digest_of
from rollout_server.engines.base import Engine
from rollout_server.weights.canary import Agreement

log = logging.getLogger(__name__)


def check_file(update: WeightUpdate) -> None:
    """Raises: WeightMismatchError if the file is missing, truncated, or not the one the learner wrote."""
    check_size(update)
    digest = digest_of(Path(update.path))
    if digest != update.digest:
        raise WeightMismatchError(
            f"weights of version {update.version}: {update.path} has the digest {digest[:16]}..., "
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


def load_verified(engine: Engine, update: WeightUpdate | WeightTransfer, agreement: Agreement) -> list[str]:
    """Steps 2 and 3, in the thread that owns the engine; step 1 runs outside of it, while the engine samples.

    Args:
        agreement: of the engine so far.

    Returns: the checks that could decide nothing, because the step was smaller than roundings: `kernels`, `base`.
    Raises: WeightMismatchError; after any exception the engine must not sample.
    """
    began = time.monotonic()
    if isinstance(update, WeightTransfer):
        decided = engine.receive_weights(update.update_info, update.version)
    else:
        decided = engine.load_weights(update.path, update.version)
    loaded = time.monotonic()
    difference = agreement.check(update.canary, engine.logprobs(update.canary.token_ids), update.version)
    undecided = [name for name, told in (("kernels", decided), ("base", agreement.decides)) if not told]
    log.info(
        "loaded weights version=%d load_s=%.3f canary_s=%.3f canary_difference=%.2e undecided=%s",
        update.version,
        loaded - began,
        time.monotonic() - loaded,
        difference,
        ",".join(undecided) or "-",
    )
    return undecided
