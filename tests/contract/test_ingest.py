"""Which policy versions a service takes for published, also when another service has changed the state."""

from __future__ import annotations

import pytest

from bapo.core.codec import PushedGroup, pack_group
from bapo.core.errors import ContractError
from bapo.core.frames import frame_digest, frame_head
from bapo.core.types import Progress
from buffer_service.ingest import KNOWN_S, Ingest
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.redis.store import RedisStore
from tests.support.buffer import answer
from tests.support.factories import make_request


def group_of(version: int) -> PushedGroup:
    frame = pack_group(answer(make_request(), version=version))
    return PushedGroup(bytes(frame_head(frame)), "0" * 32, frame_digest(frame))


def test_a_service_hears_of_a_restore_by_another_one(redis_url: str) -> None:
    """Version 7 was published, and taken; then another service restores a state before step 1."""
    store, seconds = RedisStore(RedisLink(redis_url), "run", lease_s=60, max_attempts=3), [100.0]
    before = store.image()
    ingest, group = Ingest(store, now=lambda: seconds[0]), group_of(7)
    store.report(Progress(step=7, policy_version=7))
    ingest.checked([group])
    store.restore(before, ())
    seconds[0] += KNOWN_S
    with pytest.raises(ContractError, match="policy version 7, but the learner has published 1 at most"):
        ingest.checked([group])


def test_versions_up_to_the_newest_are_asked_for_once_a_second(redis_url: str) -> None:
    asked: list[float] = []

    class Counting(RedisStore):
        def progress(self) -> Progress:
            asked.append(seconds[0])
            return Progress(step=7, policy_version=7)

    seconds = [100.0]
    ingest = Ingest(Counting(RedisLink(redis_url), "run", lease_s=60, max_attempts=3), now=lambda: seconds[0])
    for version, second in ((3, 100.0), (7, 100.5), (1, 100.9), (7, 101.0), (2, 101.5)):
        seconds[0] = second
        ingest.checked([group_of(version)])
    assert asked == [100.0, 101.0]


def test_a_digest_that_is_not_that_of_the_head_is_refused(redis_url: str) -> None:
    ingest = Ingest(RedisStore(RedisLink(redis_url), "run", lease_s=60, max_attempts=3))
    with pytest.raises(ContractError, match="the digest of its frame is that of another"):
        ingest.checked([group_of(1)._replace(digest="0" * 32)])
