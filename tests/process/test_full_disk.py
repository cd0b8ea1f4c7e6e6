"""A disk that is full: Redis goes on to answer, and what it could not write is acknowledged to nobody."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import redis

from bapo.core.codec import pack_batch, pack_group
from bapo.core.errors import StorageError, UnavailableError
from bapo.core.types import Prompt, RolloutRequest
from buffer_service.store.redis.keys import Keys
from buffer_service.store.redis.store import RedisStore
from tests.support.buffer import answer, incoming, new_store
from tests.support.buffer_app import serving, small_config
from tests.support.factories import make_request
from tests.support.redis_server import RedisServer
from tests.support.small_disk import fill

LEFT_BYTES = 1 << 20


@pytest.fixture
def redis_on_disk(small_disk: Path) -> Iterator[Callable[[str], RedisServer]]:
    """Makes a server whose append-only file is on the small disk."""
    servers: list[RedisServer] = []

    def made(fsync: str) -> RedisServer:
        servers.append(RedisServer(small_disk, aof=True, options=("--appendfsync", fsync)).start())
        return servers[-1]

    yield made
    for server in servers:
        server.stop()


def almost_full(disk: Path, left: int = LEFT_BYTES) -> Path:
    """The file whose removal makes room again."""
    fill(disk / "filler")
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - left)
    return disk / "filler"


def requests_of(number: int, text: str = "") -> list[RolloutRequest]:
    prompts = [Prompt(prompt_id=f"p{i:03d}", text=text, task="sums", answer={}) for i in range(number)]
    return [msgspec.structs.replace(make_request(request_id=f"f-{p.prompt_id}"), prompt=p) for p in prompts]


def pushed(store: RedisStore, requests: list[RolloutRequest]) -> Iterator[str]:
    """Acknowledged ids, until the disk is full."""
    store.enqueue(requests, cursor=None)
    for request in requests:
        group = incoming(answer(request))
        # Random bytes behind it: what the store is given it keeps, and 30 kB of zeros would make a smaller file.
        frame = group.frame + os.urandom(30_000)
        record = msgspec.structs.replace(group.record, num_bytes=len(frame))
        assert store.push([msgspec.structs.replace(group, frame=frame, record=record)]) == ["stored"]
        yield request.request_id


def asked(store: RedisStore, requests: list[RolloutRequest]) -> Iterator[str]:
    for request in requests:
        assert store.enqueue([request], cursor=None) == 1
        yield request.request_id


@pytest.mark.parametrize(
    ("fsync", "end"), [("everysec", RedisServer.kill), ("everysec", RedisServer.end), ("always", RedisServer.stop)]
)
@pytest.mark.parametrize("table", ["records", "live"])
def test_what_was_acknowledged_before_the_disk_was_full_is_kept(
    small_disk: Path,
    redis_on_disk: Callable[[str], RedisServer],
    fsync: str,
    end: Callable[[RedisServer], None],
    table: str,
) -> None:
    """With `always` Redis ends itself when it cannot write."""
    server = redis_on_disk(fsync)
    store = new_store(server.url)
    acknowledged: list[str] = []
    requests = requests_of(100, "x" * (100 if table == "records" else 30_000))
    filler = almost_full(small_disk)
    with pytest.raises((StorageError, UnavailableError)) as refusal:
        acknowledged.extend((pushed if table == "records" else asked)(store, requests))
    assert isinstance(refusal.value, StorageError) == (fsync == "everysec"), refusal.value
    end(server)
    filler.unlink()
    server.start()
    with redis.Redis.from_url(server.url) as raw:
        kept = {key.decode() for key in raw.hkeys(Keys("test")[table])}
    assert len(acknowledged) > 20
    assert set(acknowledged) <= kept


def test_a_batch_that_is_not_on_the_disk_is_handed_to_nobody(
    small_disk: Path, redis_on_disk: Callable[[str], RedisServer]
) -> None:
    """Not to who has assembled it, and not to who asks for it afterwards, from whichever service."""
    server, num = redis_on_disk("everysec"), 64
    config = small_config(algorithm={"batch_size": num}, cadence={"max_steps_ahead": 1000})
    one, two = new_store(server.url), new_store(server.url)
    with serving(one, config) as first, serving(two, config) as second:
        requests = requests_of(num)
        first.enqueue(requests, cursor=num)
        first.push([pack_group(answer(request, "11000000")) for request in requests])
        # Room is left for less than a page; what an assembly of 64 groups writes is larger.
        filler = almost_full(small_disk, 0)
        for client in (first, second):
            with pytest.raises(StorageError):
                client.batch(1, timeout_s=5)
        assert first.status().assembled_step == 1, "it is assembled, in Redis' memory"
        filler.unlink()
        batch = pack_batch(second.batch(1, timeout_s=60))
        assert pack_batch(first.batch(1, timeout_s=60)) == batch
        server.kill()
        server.start()
        assert pack_batch(second.batch(1, timeout_s=60)) == batch
        second.commit(1, checkpointed=1)
