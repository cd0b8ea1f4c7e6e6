"""The buffer service as all ranks of the learner see it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from bapo.core.types import Progress
from learner.distributed.stopping import StopFlag, Stopped
from learner.distributed.world import World
from learner.protocols import Buffer

WANTED, NOT_WANTED = b"1", b"0"
STILL_WAITING = b"."
"""No batch yet: the other ranks hear that rank 0 lives, because a wait that makes progress has no time limit."""


class StoppedTogether(Stopped):
    """All ranks know."""


class SharedBuffer:
    """Rank 0 asks, every rank gets the batch; what changes the buffer is done by rank 0 alone."""

    def __init__(self, buffer: Buffer | None, world: World, stop: StopFlag) -> None:
        """`buffer` is None on the ranks that follow."""
        self._buffer = buffer
        self._world = world
        self._stop = stop

    def batch_frame(
        self, step: int, *, timeout_s: float, on_wait: Callable[[str], None] | None = None
    ) -> bytes | memoryview:
        """D_t on every rank, as bytes. A signal ends the wait of rank 0 at once, that of others at its next message.

        Raises: Stopped on all ranks; on rank 0 what the buffer raised, and on the others Stopped then.
        """

        def relay(reason: str) -> None:
            with self._stop.busy():
                self._world.share(STILL_WAITING)
                self.stop_together()
            if on_wait is not None:
                on_wait(reason)

        def ask(buffer: Buffer) -> bytes | memoryview:
            with self._stop.waiting():
                return buffer.batch_frame(step, timeout_s=timeout_s, on_wait=relay)

        return self._from_leader(ask, f"waited for batch {step}")

    def stop_together(self) -> None:
        """All ranks must call it. Raises: Stopped on all when any was asked to end."""
        if self._world.any(self._stop.asked):
            raise StoppedTogether("this rank or another was asked to end")

    def commit(self, step: int, *, checkpointed: int) -> bool:
        """By rank 0; every rank hears whether the buffer wants a checkpoint. Raises: as `batch_frame`."""
        answer = self._from_leader(
            lambda buffer: WANTED if buffer.commit(step, checkpointed=checkpointed) else NOT_WANTED,
            f"committed step {step}",
        )
        return answer == WANTED

    def _from_leader(self, ask: Callable[[Buffer], bytes | memoryview], doing: str) -> bytes | memoryview:
        """What rank 0 gets by asking, on every rank. `doing`: in words, for the ranks that do not hear of it."""
        if not self._world.leads:
            while (answer := self._world.share(None)) == STILL_WAITING:
                self.stop_together()
            if answer is None:
                raise Stopped(f"rank 0 ended while it {doing}")
            return answer
        try:
            answer = ask(self._leader)
        except StoppedTogether:
            raise
        except BaseException:  # also Stopped, which is no Exception: the other ranks wait for rank 0, whatever ends it
            with suppress(RuntimeError):  # a rank that is gone must not hide why this one ends
                self._world.share(None)
            raise
        self._world.share(answer)
        return answer

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
