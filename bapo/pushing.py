"""A push: ask for room where that is not known, write the frames, then hand over the heads of the groups.

GET /room --there is--> frames (`bapo.frame_transfer`) --> POST /groups: head, name and digest of each
    ^                                                         |
    +------------- 429, and the frames stay where they are ---+   fresh groups only; the others never wait for room
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence

from bapo.call_sizes import MOST_GROUPS, in_parts_by_size
from bapo.errors import ContractError, FrameError, FullError
from bapo.frame_transfer import FrameTransfer
from bapo.frames import frame_digest, frame_head
from bapo.peer import Peer
from bapo.seldom import Seldom
from bapo.types import Purpose
from bapo.wire import PushedGroup, pack_push, read_group_header

log = logging.getLogger(__name__)

MOST_PUSH_BYTES = 32 << 20
"""Of the frames of one call; more travel in several."""
ROOM_S = 10.0
"""How long one question for room stays open."""
ROOM_KNOWN_S = 1.0
"""How long the room that an answer tells of is taken for granted."""
FRAME = bytes | bytearray | memoryview
SAID_S = 30.0
"""A buffer that stays full is worth a line this often: each push of each worker may have to wait."""
_waiting = Seldom(SAID_S)


class Pusher:
    """Pushes groups to one buffer service. Thread-safe."""

    def __init__(self, peer: Peer, frames: FrameTransfer, *, full_s: float) -> None:
        """`full_s`: how long a push waits for room."""
        self._peer, self._frames, self._full_s = peer, frames, full_s
        self._room_until = 0.0
        """By the monotonic clock; -inf: the newest answer was that there is none."""

    def push(self, frames: Sequence[bytes]) -> dict[str, str]:
        """Group id -> fate. Raises: as `BufferClient.push`; FullError when there was no room for `full_s`."""
        fates: dict[str, str] = {}
        for part in filter(None, in_parts_by_size(_checked(frames), MOST_GROUPS, MOST_PUSH_BYTES)):
            fresh: list[bytes] = []
            others: list[bytes] = []
            for frame in part:
                (fresh if read_group_header(frame).purpose is Purpose.FRESH else others).append(frame)
            # The learner may need the others for the batch that makes room: they ask for none.
            for some, asks in ((others, False), (fresh, True)):
                fates |= self._push(some, asks_room=asks) if some else {}
        return fates

    def _push(self, frames: Sequence[bytes], *, asks_room: bool) -> dict[str, str]:
        deadline = time.monotonic() + self._full_s
        names: list[str] | None = None
        was_missing = False
        while True:
            has_room = False
            try:
                if asks_room and time.monotonic() > self._room_until:
                    query = {"wait_s": f"{self._wait_s(deadline):.3f}"}
                    self._peer.call("GET", "/room", query=query, wait_s=ROOM_S, full_s=0.0)
                    self._room_until = time.monotonic() + ROOM_KNOWN_S
                has_room = True
                names = names or self._frames.put(frames)
                return self._admitted(frames, names)
            except FrameError:  # it has expired, or Redis was started again before it was written
                if was_missing:
                    raise
                was_missing, names = True, None
            except FullError as error:
                self._room_until = -math.inf
                if time.monotonic() + error.retry_after_s > deadline:
                    raise
                log.log(logging.WARNING if _waiting.is_due("full") else logging.DEBUG, "a push waits: %s", error)
                if has_room:  # others were faster, or Redis has no memory for what the batch lacks
                    time.sleep(error.retry_after_s)

    def _wait_s(self, deadline: float) -> float:
        """As long as room may take: nothing the first time, so that the wait is worth a line."""
        return min(ROOM_S, max(0.0, deadline - time.monotonic())) if self._room_until < 0 else 0.0

    def _admitted(self, frames: Sequence[bytes], names: Sequence[str]) -> dict[str, str]:
        pairs = zip(frames, names, strict=True)
        groups = [PushedGroup(bytes(frame_head(frame)), name, frame_digest(frame)) for frame, name in pairs]
        answer = self._peer.call("POST", "/groups", body=pack_push(groups), full_s=0.0).json()
        self._room_until = time.monotonic() + ROOM_KNOWN_S if answer["room"] else -math.inf
        return dict(answer["groups"])


def _checked(frames: Sequence[bytes]) -> Iterator[bytes]:
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
