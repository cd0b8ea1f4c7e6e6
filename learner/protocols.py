"""Interfaces of the learner to other services, small enough to fake in tests.

Implementations: `bapo.transport.buffer_client.BufferClient`, `bapo.transport.rollout_client.RolloutClient`,
`bapo.runtime.run_directory.layout.RunDirectory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from bapo.core.types import Group, GroupResult, Progress, WeightTransfer, WeightUpdate
from bapo.transport.rollout_client import WorkerStatus


class Buffer(Protocol):
    """The part of the buffer service that the learner uses."""

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until it responds. Raises: DeadlineError."""
        ...

    def batch_frame(
        self, step: int, *, timeout_s: float, on_wait: Callable[[str], None] | None = None
    ) -> bytes | memoryview:
        """D_t, for `bapo.core.codec.unpack_batch`; the same step always gives the same bytes.

        Raises: DeadlineError with the wait reason.
        """
        ...

    def untrained(self, step: int) -> Sequence[Group]:
        """Groups that the assembly of D_t did not train, as far as they are retained. Raises: BapoError."""
        ...

    def commit(self, step: int, *, checkpointed: int) -> bool:
        """Mark a step as trained and release batches up to `checkpointed`. Returns: whether a checkpoint is due."""
        ...

    def report_progress(self, progress: Progress) -> None:
        """Report the learner's progress."""
        ...

    def snapshot(self) -> bytes:
        """All state of the buffer."""
        ...

    def restore(self, data: bytes) -> None:
        """Replace all state by a snapshot."""
        ...

    def resume(self, step: int) -> None:
        """Resume after the checkpoint of `step`. Raises: BapoError if that is not possible."""
        ...


class Fleet(Protocol):
    """The part of the rollout server that the learner uses."""

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until a worker samples. Raises: DeadlineError."""
        ...

    def update_weights(self, update: WeightUpdate, *, timeout_s: float, rollback: bool = False) -> dict[str, float]:
        """Returns once all workers sample with these weights: worker id -> seconds."""
        ...

    def workers(self) -> Sequence[WorkerStatus]:
        """All workers."""
        ...

    def transfer_weights(self, transfer: WeightTransfer, *, timeout_s: float) -> dict[str, float]:
        """Have workers receive weights while the learner sends them: worker id -> seconds."""
        ...


class Records(Protocol):
    """The part of the run directory that the learner writes."""

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """One line per step."""
        ...

    def write_groups(self, step: int, results: Sequence[GroupResult]) -> None:
        """One row per group that the assembly of the step read."""
        ...

    def make_durable(self, steps: Iterable[int]) -> None:
        """Make the records of these steps survive a power failure."""
        ...

    def write_batch(self, step: int, frame: bytes | memoryview) -> None:
        """Write the batch of a step as received."""
        ...

    def forget_batches(self, through: int) -> None:
        """Delete batches up to this step."""
        ...
