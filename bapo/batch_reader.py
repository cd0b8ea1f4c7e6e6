"""The learner's wait for a batch: long polls until it is there, through the service or straight from its Redis."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

from bapo.blocks import Blocks
from bapo.errors import DeadlineError
from bapo.named_frames import MEDIA_TYPE, FrameReader, NotReadableError, unpack_named
from bapo.peer import Answer, Peer

log = logging.getLogger(__name__)

POLL_S = 10.0
"""How long one long poll stays open: a wait is made of several, so that its reason is news."""
NAMED_AGAIN_S = 60.0
"""Frames that could not be read from Redis are not asked for by name for so long."""


class BatchReader:
    """Batches of one buffer service, as they travel."""

    def __init__(
        self, peer: Peer, *, timeout_s: float, direct: Literal["auto", "off"], now: Callable[[], float]
    ) -> None:
        """
        Args:
            timeout_s: longest silence of Redis, where frames are read from it.
            direct: auto: from Redis itself, where the service names the frames and the socket can be opened here.
            now: seconds of a clock that only rises, by which a wait is measured.
        """
        self._peer = peer
        self._blocks = Blocks()
        self._reader = FrameReader(timeout_s, self._blocks) if direct == "auto" else None
        self._named_again = 0.0
        """When frames may be asked for by name again, by the monotonic clock."""
        self._now = now

    def close(self) -> None:
        """Close the connections to Redis that are idle."""
        if self._reader is not None:
            self._reader.close()

    def frame(self, step: int, *, timeout_s: float, on_wait: Callable[[str], None] | None = None) -> bytes | memoryview:
        """The batch of `step`. Arguments and errors as in `bapo.clients.BufferClient.batch`."""
        moved = self._now()
        reason, counts = "no answer yet", None
        while (left := moved + timeout_s - self._now()) > 0:
            answer = self._poll(step, left)
            if answer.media_type == MEDIA_TYPE:
                if (frame := self._read_named(step, answer.body)) is not None:
                    return frame
                continue
            if answer.status == 200:
                return answer.block
            waiting = answer.json()
            reason, found = waiting["reason"], waiting.get("counts")
            if counts is not None and found != counts:
                moved = self._now()
            counts = found
            if on_wait is not None:
                on_wait(reason)
        raise DeadlineError(f"batch {step} did not come, and nothing moved for {timeout_s:.0f} s: {reason}")

    def _poll(self, step: int, left_s: float) -> Answer:
        wait_s = min(POLL_S, left_s)
        retry_s = min(self._peer.retry_s, left_s)
        query = {"wait_s": f"{wait_s:.3f}"}
        if self._reader is not None and time.monotonic() >= self._named_again:
            query["frames"] = "named"
        return self._peer.call(
            "POST", f"/batches/{step}", query=query, wait_s=wait_s, retry_s=retry_s, blocks=self._blocks
        )

    def _read_named(self, step: int, answer: bytes) -> memoryview | None:
        assert self._reader is not None
        try:
            return self._reader.batch_frame(unpack_named(answer))
        except NotReadableError as error:
            log.info("batch %d comes through the buffer service: %s", step, error)
            self._named_again = time.monotonic() + NAMED_AGAIN_S
            return None
