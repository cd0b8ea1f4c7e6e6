"""The buffer service as all ranks of the learner see it."""

from __future__ import annotations

from collections.abc import Callable

from bapo.types import Batch, Progress
from bapo.wire import pack_batch, unpack_batch
from learner.distributed import World
from learner.protocols import Buffer
from learner.stopping import Stopped

WANTED, NOT_WANTED = b"1", b"0"


class SharedBuffer:
    """Rank 0 asks, every rank gets the batch; what changes the buffer is done by rank 0 alone."""

    def __init__(self, buffer: Buffer | None, world: World) -> None:
        """`buffer` is None on the ranks that follow."""
        self._buffer = buffer
        self._world = world

    def batch(self, step: int, *, timeout_s: float, on_wait: Callable[[str], None] | None = None) -> Batch:
        """D_t on every rank. Raises: on rank 0 what the buffer raised; on the others Stopped."""
        if self._world.size == 1:
            return self._leader.batch(step, timeout_s=timeout_s, on_wait=on_wait)
        if not self._world.leads:
            frame = self._world.share(None)
            if frame is None:
                raise Stopped(f"rank 0 ended while it waited for batch {step}")
            return unpack_batch(frame)
        try:
            batch = self._leader.batch(step, timeout_s=timeout_s, on_wait=on_wait)
        except BaseException:
            self._world.share(None)
            raise
        self._world.share(pack_batch(batch))
        return batch

    def commit(self, step: int, *, checkpointed: int) -> bool:
        """By rank 0; every rank hears whether the buffer wants a checkpoint. Raises: as `batch`."""
        if not self._world.leads:
            if (answer := self._world.share(None)) is None:
                raise Stopped(f"rank 0 ended while it committed step {step}")
            return answer == WANTED
        try:
            is_wanted = self._leader.commit(step, checkpointed=checkpointed)
        except BaseException:
            self._world.share(None)
            raise
        self._world.share(WANTED if is_wanted else NOT_WANTED)
        return is_wanted

    def report_progress(self, progress: Progress) -> None:
        """By rank 0."""
        if self._world.leads:
            self._leader.report_progress(progress)

    def snapshot(self) -> bytes:
        """By rank 0, which alone writes it."""
        return self._leader.snapshot() if self._world.leads else b""

    def restore(self, data: bytes) -> None:
        """By rank 0."""
        if self._world.leads:
            self._leader.restore(data)

    def resume(self, step: int) -> None:
        """By rank 0."""
        if self._world.leads:
            self._leader.resume(step)

    @property
    def _leader(self) -> Buffer:
        assert self._buffer is not None, "only rank 0 talks to the buffer service"
        return self._buffer
