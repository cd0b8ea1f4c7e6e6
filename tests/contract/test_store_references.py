"""What Redis holds beside a group: how often it is referred to, and the bytes of its frame."""

from __future__ import annotations

import redis

from buffer_service.store.redis.keys import Keys
from tests.support.buffer import PuttingRedisStore as RedisStore
from tests.support.buffer import an_assembly, stat, stored

KEYS = Keys("test")
MEGA = 1_048_576
"""Of a frame's bytes: the references are below that."""


def references(redis_url: str) -> dict[str, int]:
    with redis.Redis.from_url(redis_url) as client:
        return {key.decode(): int(value) for key, value in client.hgetall(KEYS["refs"]).items()}


def test_the_bytes_of_a_frame_lie_beside_the_number_of_its_references(redis_store: RedisStore, redis_url: str) -> None:
    stored(redis_store, "ab")
    sizes = [len(frame) for frame in redis_store.frames(["g-a", "g-b"]) if frame is not None]
    assert references(redis_url) == {"g-a": MEGA * sizes[0] + 1, "g-b": MEGA * sizes[1] + 1}
    made = an_assembly(fresh=["g-a", "g-b"], trained=["g-a"], high=[stat("g-a")], fresh_bytes=sum(sizes))
    assert redis_store.commit_assembly(made)
    # The batch and B_high; what is not trained is gone.
    assert references(redis_url) == {"g-a": MEGA * sizes[0] + 2}
    assert redis_store.status().num_bytes == sizes[0]


def test_a_restored_group_has_them_too(redis_store: RedisStore, redis_url: str) -> None:
    stored(redis_store, "a")
    (frame,) = redis_store.frames(["g-a"])
    assert frame is not None
    redis_store.restore(redis_store.image(), [("g-a", bytes(frame))])
    assert references(redis_url) == {"g-a": MEGA * len(frame) + 1}
