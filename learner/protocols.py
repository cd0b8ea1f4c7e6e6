"""What the learner needs of the world outside: small enough for a fake in one process.

Implementations: `bapo.transport.buffer_client.BufferClient`, `bapo.transport.rollout_client.RolloutClient`,
`bapo.runtime.run_directory.layout.RunDirectory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from bapo.core.types import Group, GroupResult, Progress, WeightUpdate


class Buffer(Protocol):
    """The buffer service, as far as the learner uses it."""

    def wait_ready(self, timeout_s: float) -> None:
        """Return when it answers. Raises: DeadlineError."""
        ...

    def batch_frame(
        self, step: int, *, timeout_s: float, on_wait: Callable[[str], None] | None = None
    ) -> bytes | memoryview:
        """D_t, for `bapo.core.codec.unpack_batch`; the same step always gives the same bytes.

        Raises: DeadlineError with the reason of the wait.
        """
        ...

    def untrained(self, step: int) -> Sequence[Group]:
        """Groups that the assembly of D_t did not train, as far as they are held. Raises: BapoError."""
        ...

    def commit(self, step: int, *, checkpointed: int) -> bool:
        """Step is trained; batches up to `checkpointed` may be forgotten. Returns: whether it wants a checkpoint."""
        ...

    def report_progress(self, progress: Progress) -> None:
        """Tell everybody where the learner is."""
        ...

    def snapshot(self) -> bytes:
        """All state of the buffer."""
        ...

    def restore(self, data: bytes) -> None:
        """Replace all state by a snapshot."""
        ...

    def resume(self, step: int) -> None:
        """A learner continues after the checkpoint of `step`. Raises: BapoError when that is not possible."""
        ...


class Fleet(Protocol):
    """The rollout workers, as far as the learner uses them."""

    def wait_ready(self, timeout_s: float) -> None:
        """Return when a worker samples. Raises: DeadlineError."""
        ...

    def update_weights(self, update: WeightUpdate, *, timeout_s: float, rollback: bool = False) -> dict[str, float]:
        """Returns when all workers sample with these weights: worker id -> seconds."""
        ...


class Records(Protocol):
    """The run directory, as far as the learner writes it."""

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """One line per step."""
        ...

    def write_groups(self, step: int, results: Sequence[GroupResult]) -> None:
        """One row per group that the assembly of the step read."""
        ...

    def make_durable(self, steps: Iterable[int]) -> None:
        """The records of these steps survive a power failure."""
        ...

    def write_batch(self, step: int, frame: bytes | memoryview) -> None:
        """The batch of a step, as it came."""
        ...

    def forget_batches(self, through: int) -> None:
        """Batches up to this step are not needed any more."""
        ...
