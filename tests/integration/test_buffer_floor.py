"""The floor that pushes are compared with does what it says: checks, stores and answers, with a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.buffer.floor import Floor
from benchmarks.buffer.groups import SIZES, GroupMaker, requests_for


@pytest.fixture
def floor(tmp_path: Path) -> Iterator[Floor]:
    made = Floor("floor", tmp_path / "floor", aof=False)
    yield made
    made.stop()


def test_frames_lie_in_redis_for_good_when_the_answer_comes(floor: Floor) -> None:
    frames = GroupMaker(SIZES[1].tokens).frames(requests_for(7, 5, step=1, batch_size=64))  # of half a megabyte
    ids = [f"g0000000{number}" for number in (7, 8, 9)] + ["g00000010", "g00000011"]
    assert floor.call(frames) == dict.fromkeys(ids, "stored")
    redis = floor.redis.client
    assert [redis.get(f"f:{group_id}") for group_id in ids] == frames
    assert [redis.ttl(f"f:{group_id}") for group_id in ids] == [-1] * 5  # kept, where it came with a time to live
    assert redis.zrange("fresh", 0, -1) == [group_id.encode() for group_id in ids]
    assert redis.hlen("records") == 5


def test_its_rounds_begin_with_an_empty_redis(floor: Floor) -> None:
    frames = GroupMaker(SIZES[0].tokens).frames(requests_for(0, 4, step=1, batch_size=64))
    assert floor.push(SIZES[0], frames, 2).seconds > 0
    assert floor.redis.client.dbsize() == 0
