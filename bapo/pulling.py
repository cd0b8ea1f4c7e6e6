"""The learner's wait for a batch: long polls until it is there, then its frames, each of which is checked.

    POST /batches/t --header, [group id, bytes, digest], ...--> frames (`bapo.frame_transfer`) --> checked --> one frame
                                                                    | not what was announced
                                          POST /batches/t/bad-frames: the service looks itself, names and counts it;
                                          the batch goes on without what it confirms, always the same

A frame is checked here, where its bytes are anyway: length, digest, columns, log-probs. That its header answers its
request was checked when it was pushed, and the digest says that this is that header.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from bapo.batch_items import without_groups
from bapo.errors import DeadlineError, UnavailableError
from bapo.frame_transfer import FrameTransfer
from bapo.peer import Peer
from bapo.wire import frame_problem, pack_batch_frames, unpack_pull

log = logging.getLogger(__name__)

POLL_S = 10.0
"""How long one long poll stays open: a wait is made of several, so that its reason is news."""
READS = 3
"""A batch whose frames the service finds sound, and we do not, is read so often."""


class Puller:
    """Batches of one buffer service, as they travel."""

    def __init__(self, peer: Peer, frames: FrameTransfer, *, now: Callable[[], float]) -> None:
        """`now`: seconds of a clock that only rises, by which a wait is measured."""
        self._peer, self._frames, self._now = peer, frames, now

    def frame(self, step: int, *, timeout_s: float, on_wait: Callable[[str], None] | None = None) -> bytes:
        """The batch of `step`. Arguments and errors as in `bapo.clients.BufferClient.batch`."""
        moved = self._now()
        reason, counts = "no answer yet", None
        while (left := moved + timeout_s - self._now()) > 0:
            wait_s = min(POLL_S, left)
            query, retry_s = {"wait_s": f"{wait_s:.3f}"}, min(self._peer.retry_s, left)
            answer = self._peer.call("POST", f"/batches/{step}", query=query, wait_s=wait_s, retry_s=retry_s)
            if answer.status == 200:
                return self._read(step, answer.body)
            waiting = answer.json()
            reason, found = waiting["reason"], waiting.get("counts")
            if counts is not None and found != counts:
                moved = self._now()
            counts = found
            if on_wait is not None:
                on_wait(reason)
        raise DeadlineError(f"batch {step} did not come, and nothing moved for {timeout_s:.0f} s: {reason}")

    def _read(self, step: int, answer: bytes) -> bytes:
        header, pulled = unpack_pull(answer)
        for _ in range(READS):
            frames = dict(zip(pulled, self._frames.get([item.group_id for item in pulled]), strict=True))
            problems = {item.group_id: frame_problem(frame, *item[1:]) for item, frame in frames.items()}
            suspects = [group_id for group_id, problem in problems.items() if problem]
            bad = self._confirmed(step, suspects) if suspects else {}
            if bad.keys() == set(suspects):
                sound = [frame for item, frame in frames.items() if frame is not None and item.group_id not in bad]
                kept = without_groups(header, [item.group_id for item in pulled], bad) if bad else header
                return pack_batch_frames(kept, sound)
        raise UnavailableError(f"the frames of batch {step} came damaged {READS} times, and are sound in the buffer")

    def _confirmed(self, step: int, suspects: list[str]) -> dict[str, str]:
        """Group id -> what is wrong with its frame, by the service's own look."""
        answer = self._peer.call("POST", f"/batches/{step}/bad-frames", body={"group_ids": suspects})
        bad = dict(answer.json()["bad"])
        for group_id, problem in bad.items():
            log.warning("batch %d goes on without group %s: its frame is bad (%s)", step, group_id, problem)
        return bad
