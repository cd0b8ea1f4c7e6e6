"""The groups of one push, looked at and handed to the store while the rest of them is still on its way.

    socket --frame 3--> service (check) --frame 2--> Redis, under a name that expires
                                             at the end: one script admits all of them, or none

The sender, the service and Redis work at the same time, instead of one after the other. A frame that is malformed
stops this; the body is read to its end, refused as a whole, and what was handed over is deleted again.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from bapo.call_sizes import MOST_GROUPS
from bapo.errors import BapoError, ContractError, Refusal
from bapo.frames import split_frames, whole_frames
from bapo.wire import check_group
from buffer_service.groups import Incoming, record_of
from buffer_service.store import Store


class Arrival:
    """One push. Used by one thread at a time."""

    def __init__(self, store: Store) -> None:
        self.upload = store.upload()
        self._groups: list[Incoming] = []
        self._end = 0
        """So many bytes of the body are in `_groups`."""
        self._error: BapoError | None = None

    def came(self, body: memoryview) -> None:
        """So much is here. Blocks while the store takes what is new in it; `groups` says what is wrong."""
        if self._error is not None:
            return
        try:
            for frame in whole_frames(body[self._end :]):
                _add(self._groups, frame)
                self._end += len(frame)
                self.upload.put(frame)
        except BapoError as error:
            self._error = error

    def paused(self) -> None:
        """Nothing comes for a while: hold nothing of the store meanwhile."""
        try:
            self.upload.pause()
        except BapoError as error:
            self._error = self._error or error

    def groups(self, body: bytes | bytearray | memoryview) -> list[Incoming]:
        """All groups of the whole body. Raises: ContractError for a malformed one; UnavailableError."""
        if self._error is not None:
            raise self._error
        groups = [*self._groups]
        for frame in split_frames(memoryview(body)[self._end :]):
            _add(groups, frame)
        return groups

    def give_up(self) -> None:
        """The push is refused, or its sender has gone. Blocks."""
        self._error = None  # its frames have us: a circle, which would hold the whole body
        self.upload.drop()


def _add(groups: list[Incoming], frame: memoryview) -> None:
    if len(groups) == MOST_GROUPS:
        message = f"more than {MOST_GROUPS} groups in one push: send them in several"
        raise ContractError(message, Refusal.TOO_MANY)
    groups.append(incoming(frame))


def incoming(frame: memoryview) -> Incoming:
    """A frame and its record. Its tokens are looked at, so that the learner can open every batch."""
    group = check_group(frame)
    record = record_of(group, len(frame), checksum_of(frame))
    return Incoming(record=record, frame=frame, newest_version=group.newest_version)


def checksum_of(frame: memoryview | bytes) -> int:
    """The low 32 bits of XXH3: as wide as a CRC-32, at a thirteenth of its time (ADR 0158)."""
    return xxh3_64_intdigest(frame) & 0xFFFFFFFF
