"""A push, in parts that the buffer takes, and what happens while it is full.

all of a part --429--> those that are not fresh, at once; the fresh ones when the buffer says that it has room
                       --429 again--> the fresh ones after the pause that the answer names, when there is room
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence

from bapo.call_sizes import MOST_GROUPS, in_parts_by_size
from bapo.errors import ContractError, FullError
from bapo.peer import Peer
from bapo.types import Purpose
from bapo.wire import read_group_header

log = logging.getLogger(__name__)

MOST_PUSH_BYTES = 32 << 20
"""More than this travels in several calls."""
ROOM_S = 10.0
"""How long one question for room stays open."""
FRAME = bytes | bytearray | memoryview
SAID_S = 30.0
"""A buffer that stays full is worth a line this often: each push of each worker may have to wait."""


class _Seldom:
    """Whether something is worth saying again."""

    def __init__(self) -> None:
        self._said_at = -math.inf

    def is_due(self) -> bool:
        now = time.monotonic()
        if now - self._said_at < SAID_S:
            return False
        self._said_at = now
        return True


_waiting = _Seldom()


def push_all(peer: Peer, frames: Sequence[bytes], *, full_s: float) -> dict[str, str]:
    """Group id -> fate. Raises: as `BufferClient.push`; FullError when there was no room for `full_s`."""
    fates: dict[str, str] = {}
    for part in _parts(frames):
        try:
            fates.update(_push(peer, part))
        except FullError as error:
            log.log(logging.WARNING if _waiting.is_due() else logging.DEBUG, "a push waits: %s", error)
            fates.update(_push_by_purpose(peer, part, full_s))
    return fates


def _push(peer: Peer, frames: Sequence[bytes]) -> dict[str, str]:
    return dict(peer.call("POST", "/groups", body=frames, full_s=0.0).json()["groups"])


def _push_by_purpose(peer: Peer, frames: Sequence[bytes], full_s: float) -> dict[str, str]:
    """Fresh groups wait; the others do not, for the learner may need them for the batch that makes room."""
    fresh: list[bytes] = []
    others: list[bytes] = []
    for frame in frames:
        (fresh if read_group_header(frame).purpose is Purpose.FRESH else others).append(frame)
    fates: dict[str, str] = {}
    if others:
        answer = peer.call("POST", "/groups", query={"fresh": "false"}, body=others)
        fates.update(answer.json()["groups"])
    return fates | (_push_when_there_is_room(peer, fresh, full_s) if fresh else {})


def _push_when_there_is_room(peer: Peer, frames: Sequence[bytes], full_s: float) -> dict[str, str]:
    deadline = time.monotonic() + full_s
    while True:
        # Asked for, so that the groups are not sent again and again.
        peer.call("GET", "/room", query={"wait_s": f"{min(ROOM_S, full_s):.3f}"}, wait_s=ROOM_S)
        try:
            return _push(peer, frames)
        except FullError as error:
            # Others were faster, or Redis has no memory for what the batch lacks: /room says yes at once then.
            if time.monotonic() + error.retry_after_s > deadline:
                raise
            time.sleep(error.retry_after_s)


def _parts(frames: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Frames in parts of at most MOST_PUSH_BYTES and MOST_GROUPS, at least one frame each."""
    return filter(None, in_parts_by_size(_frames(frames), MOST_GROUPS, MOST_PUSH_BYTES))


def _frames(frames: Sequence[bytes]) -> Iterator[bytes]:
    """Raises: ContractError for what is none, a group for example that nobody has packed."""
    if isinstance(frames, FRAME):
        raise ContractError("push takes a list of frames, got one frame: push([pack_group(group)])")
    for frame in frames:
        if not isinstance(frame, FRAME):
            found = type(frame).__name__
            raise ContractError(f"push takes frames, got {found}: push([pack_group(group)])")
        if not frame:
            raise ContractError("a frame is empty")
        yield frame
