"""Groups of a push that are handed to the store while the rest of the body is still on its way."""

from __future__ import annotations

import pytest

from bapo.errors import ContractError, UnavailableError
from bapo.frames import PREFIX, whole_frames
from bapo.wire import pack_group
from buffer_service.arrival import Arrival
from buffer_service.memory_store import MemoryStore
from tests.factories import make_group


class Noting:
    """An upload that notes what happens to it."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.frames: list[bytes] = []
        self.calls: list[str] = []
        self._breaks = breaks

    def put(self, frame: bytes | memoryview) -> None:
        if self._breaks:
            raise UnavailableError("the store is away")
        self.frames.append(bytes(frame))

    def pause(self) -> None:
        self.calls.append("pause")
        if self._breaks:
            raise UnavailableError("the store is away")

    def drop(self) -> None:
        self.calls.append("drop")


class NotingStore(MemoryStore):
    """A memory store whose uploads note what happens to them."""

    def __init__(self, upload: Noting) -> None:
        super().__init__("test", lease_s=60.0, max_attempts=3)
        self._upload = upload

    def upload(self) -> Noting:
        return self._upload


FRAMES = [pack_group(make_group(group_id=f"g-{name}")) for name in "abc"]
BODY = b"".join(FRAMES)
TWO = len(FRAMES[0]) + len(FRAMES[1])


def ids(arrival: Arrival) -> list[str]:
    return [group.record.group_id for group in arrival.groups(BODY)]


@pytest.mark.parametrize("came", [0, 2, 3])
def test_a_push_has_a_bounded_number_of_groups(monkeypatch: pytest.MonkeyPatch, came: int) -> None:
    monkeypatch.setattr("buffer_service.arrival.MOST_GROUPS", 2)
    arrival = Arrival(NotingStore(Noting()))
    arrival.came(memoryview(b"".join(FRAMES[:came])))
    with pytest.raises(ContractError, match="more than 2 groups in one push: send them in several"):
        arrival.groups(BODY)


def test_a_frame_is_handed_over_as_soon_as_it_is_whole() -> None:
    upload = Noting()
    arrival = Arrival(NotingStore(upload))
    seen = []
    for end in (5, len(FRAMES[0]) - 1, len(FRAMES[0]), TWO + 3, len(BODY)):
        arrival.came(memoryview(BODY)[:end])
        seen.append(len(upload.frames))
    assert seen == [0, 0, 1, 2, 3]
    assert upload.frames == FRAMES
    assert ids(arrival) == ["g-a", "g-b", "g-c"]


def test_groups_that_nobody_saw_come_are_in_the_body_all_the_same() -> None:
    upload = Noting()
    arrival = Arrival(NotingStore(upload))
    arrival.came(memoryview(BODY)[:TWO])
    assert len(upload.frames) == 2
    assert ids(arrival) == ["g-a", "g-b", "g-c"]


def test_after_a_malformed_frame_nothing_more_is_handed_over() -> None:
    upload = Noting()
    arrival = Arrival(NotingStore(upload))
    broken = FRAMES[0] + b"XXXX" + FRAMES[1][4:] + FRAMES[2]
    arrival.came(memoryview(broken))
    assert upload.frames == FRAMES[:1]
    with pytest.raises(ContractError, match="not a BAPO frame"):
        arrival.groups(broken)
    arrival.give_up()
    assert upload.calls == ["drop"]


def test_a_store_that_goes_away_in_between_is_told_at_the_end() -> None:
    for happens in ("came", "paused"):
        arrival = Arrival(NotingStore(Noting(breaks=True)))
        if happens == "came":
            arrival.came(memoryview(BODY))
        else:
            arrival.paused()
        with pytest.raises(UnavailableError, match="away"):
            arrival.groups(BODY)


def test_a_body_that_ends_inside_a_frame_is_refused() -> None:
    arrival = Arrival(NotingStore(Noting()))
    arrival.came(memoryview(BODY)[:-1])
    with pytest.raises(ContractError, match="cut off"):
        arrival.groups(BODY[:-1])


def test_what_is_shorter_than_a_prefix_may_still_become_a_frame() -> None:
    assert list(whole_frames(memoryview(FRAMES[0])[: PREFIX.size - 1])) == []
    assert list(whole_frames(memoryview(b""))) == []
    with pytest.raises(ContractError, match="not a BAPO frame"):
        list(whole_frames(memoryview(b"X" * PREFIX.size)))
