"""Access to the buffer service from all ranks of the learner."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from bapo.core.types import Group, Progress
from learner.distributed.stopping import StopFlag, Stopped
from learner.distributed.world import World

WANTED, NOT_WANTED = b"1", b"0"
STILL_WAITING = b"."
"""No batch yet. Keeps the other ranks from timing out, because a wait that makes progress has no time limit."""


class StoppedTogether(Stopped):
    """Raised on all ranks."""


class BatchSource(Protocol):
    """Where rank 0 gets batches: the client of the buffer service, or a file (`learner/sft_data.py`)."""

    def batch_frame(
        self, step: int, *, timeout_s: float, on_wait: Callable[[str], None] | None = None
    ) -> bytes | memoryview: ...
    def commit(self, step: int, *, checkpointed: int) -> bool: ...
    def report_progress(self, progress: Progress) -> None: ...
    def snapshot(self) -> bytes: ...
    def restore(self, data: bytes) -> None: ...
    def resume(self, step: int) -> None: ...
    def wait_ready(self, timeout_s: float) -> None: ...
    def untrained(self, step: int) -> list[Group]: ...


class SharedBuffer:
    """Rank 0 requests batches and shares them with every rank; only rank 0 changes the buffer."""

    def __init__(self, buffer: BatchSource | None, world: World, stop: StopFlag) -> None:
        """`buffer`: None on ranks other than 0."""
        self._buffer = buffer
        self._world = world
        self._stop = stop

    def batch_frame(
        self, step: int, *, timeout_s: float, on_wait: Callable[[str], None] | None = None
    ) -> bytes | memoryview:
        """D_t on every rank, as bytes. A signal ends the wait of rank 0 immediately, of others at its next message.

        Raises: Stopped on all ranks; if the buffer client raises on rank 0, Stopped on the others.
        """

        def relay(reason: str) -> None:
            with self._stop.busy():
                self._world.share(STILL_WAITING)
                self.stop_together()
            if on_wait is not None:
                on_wait(reason)

        def fetch(buffer: BatchSource) -> bytes | memoryview:
            with self._stop.waiting():
                return buffer.batch_frame(step, timeout_s=timeout_s, on_wait=relay)

        return self._from_leader(fetch, f"waited for batch {step}")

    def stop_together(self) -> None:
        """Raises: Stopped on all ranks if any was asked to stop. Collective."""
        if self._world.any(self._stop.asked):
            raise StoppedTogether("this rank or another was asked to stop")

    def commit(self, step: int, *, checkpointed: int) -> bool:
        """Commit on rank 0; every rank gets whether a checkpoint is requested. Raises: as `batch_frame`."""
        answer = self._from_leader(
            lambda buffer: WANTED if buffer.commit(step, checkpointed=checkpointed) else NOT_WANTED,
            f"committed step {step}",
        )
        return answer == WANTED

    def _from_leader(self, fetch: Callable[[BatchSource], bytes | memoryview], doing: str) -> bytes | memoryview:
        """Run `fetch` on rank 0 and share its result. `doing`: description for the error on the other ranks."""
        if not self._world.leads:
            while (answer := self._world.share(None)) == STILL_WAITING:
                self.stop_together()
            if answer is None:
                raise Stopped(f"rank 0 stopped while it {doing}")
            return answer
        try:
            answer = fetch(self._leader)
        except StoppedTogether:
            raise
        except BaseException:  # also Stopped, a BaseException: the other ranks wait for rank 0, whatever stops it
            with suppress(RuntimeError):  # a lost rank must not hide why this one stops
                self._world.share(None)
            raise
        self._world.share(answer)
        return answer

    def report_progress(self, progress: Progress) -> None:
        """On rank 0."""
        if self._world.leads:
            self._leader.report_progress(progress)

    def snapshot(self) -> bytes:
        """On rank 0, which writes the checkpoint."""
        return self._leader.snapshot() if self._world.leads else b""

    def restore(self, data: bytes) -> None:
        """On rank 0."""
        if self._world.leads:
            self._leader.restore(data)

    def resume(self, step: int) -> None:
        """On rank 0."""
        if self._world.leads:
            self._leader.resume(step)

    @property
    def _leader(self) -> BatchSource:
        assert self._buffer is not None, "only rank 0 calls the buffer service"
        return self._buffer
