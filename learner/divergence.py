"""Stop while the weights are still sound, and keep the batch so that it can be looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from bapo.errors import DivergenceError, StorageError
from bapo.records import RunDirectory
from bapo.types import Batch
from bapo.wire import pack_batch


def refuse_divergence(
    batch: Batch, groups: Sequence[int], where: str, loss: float, grad_norm: float, *, run_path: Path, leads: bool
) -> None:
    """Return when both numbers are finite.

    Args:
        groups: of the batch, that the mini-batch holds.
        where: which mini-batch, in words.
    Raises: DivergenceError, after rank 0 has written the batch; StorageError.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    path = RunDirectory(run_path).diverged_path(batch.step)
    if leads:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pack_batch(batch))
        except OSError as error:
            raise StorageError(f"step {batch.step} diverged and {path} cannot be written: {error}") from error
    names = ", ".join(batch.entries[i].group.group_id for i in groups)
    raise DivergenceError(
        f"step {batch.step}, {where}: loss is {loss}, gradient norm {grad_norm}; weights were not changed by it. "
        f"Groups: {names}. The batch is in {path}. "
        f"Repeat it alone with `bapo replay RUN --step {batch.step}`; lower learner.lr, learner.grad_clip or "
        "loss.importance_cap, then resume from the last checkpoint"
    )
