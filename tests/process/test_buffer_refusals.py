"""Redis full, its disk full, its password wrong: a clear error, nothing acknowledged is lost, and it goes on."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import redis

from bapo.core.codec import pack_group
from bapo.core.errors import ConfigError, DeadlineError, FullError, StorageError, UnavailableError
from bapo.core.types import Group, Purpose, RolloutRequest
from bapo.transport.buffer_client import BufferClient
from learner.checkpoint import Checkpoint
from learner.distributed.shared_buffer import SharedBuffer
from learner.startup import resume_buffer
from tests.support.buffer import answer, incoming, new_store
from tests.support.buffer_app import serving, small_config
from tests.support.factories import make_group, make_request
from tests.support.redis_server import RedisServer
from tests.support.wait import wait_until

SECRET = b"SECRET-PAYLOAD"


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path, options=("--enable-protected-configs", "local")).start()
    yield server
    server.stop()


def large_group(request: RolloutRequest) -> Group:
    """256 kB that say who sent them; 6/8 is above the window of B_high, so that a released batch is really gone."""
    return make_group(
        rewards="11111100",
        group_id=request.request_id,
        prompt=request.prompt,
        purpose=request.purpose,
        step=request.step,
        worker_id=SECRET.decode(),
        lengths=[4000] * 8,
    )


def large(request: RolloutRequest) -> bytes:
    return pack_group(large_group(request))


def has_no_room(client: BufferClient) -> bool:
    try:
        client._service.call("GET", "/room", full_s=0.0)
    except FullError:
        return True
    return False


def test_a_full_redis_refuses_groups_while_the_learner_drains_it(own_redis: RedisServer) -> None:
    requests = [make_request(prompt_id=f"p{i}") for i in range(20)]
    frames = [large(request) for request in requests]
    with (
        redis.Redis.from_url(own_redis.url) as raw,
        serving(new_store(own_redis.url), small_config(cadence={"max_steps_ahead": 1000})) as client,
    ):
        client.enqueue(requests, cursor=20)
        client.claim("w", limit=20, policy_version=1)
        client.push(frames[:8])
        used = raw.info("memory")["used_memory"]
        raw.config_set("maxmemory", used - 1000)
        impatient = type(client)(client.url, retry_s=0.0, full_s=0.0)
        with pytest.raises(
            FullError,
            match=r"is full: .*buffer.max_memory_mb|is full: groups are accepted again .* raise buffer.max_memory_mb",
        ) as e:
            impatient.push(frames[8:12])
        assert SECRET.decode() not in str(e.value)
        assert len(str(e.value)) < 400
        # The learner and the bookkeeping of workers go on, and make room.
        assert client.status().fresh_ready == 8
        assert client.renew("w", ["g-p8"]) == ["g-p8"]
        client.fail("w", "g-p19", reason="engine", detail="")
        wait_until(lambda: has_no_room(impatient))  # the service looks at Redis every now and then
        assert client.claim("v", limit=1, policy_version=1) == [], "a group that nobody could take"
        for step in (1, 2):
            assert len(client.batch(step, timeout_s=60).entries) == 4
            client.commit(step, checkpointed=step)
        assert client.push(frames[8:9]) == {"g-p8": "stored"}
        assert [r.request_id for r in client.claim("v", limit=1, policy_version=1)] == ["g-p19"]
        assert client.release("v") == 1
        assert client.status().fresh_ready == 1
        assert not list(raw.scan_iter("*:incoming:*"))


def test_a_learner_that_waits_for_what_a_full_redis_refuses_hears_of_it(own_redis: RedisServer) -> None:
    requests = [make_request(prompt_id=f"p{i}") for i in range(4)]
    config = small_config(cadence={"max_steps_ahead": 1000})
    with (
        redis.Redis.from_url(own_redis.url) as raw,
        serving(new_store(own_redis.url), config) as client,
    ):
        client.enqueue(requests, cursor=4)
        client.push([large(request) for request in requests[:2]])
        raw.config_set("maxmemory", 1)
        with pytest.raises(DeadlineError, match="Redis uses "):
            client.batch(1, timeout_s=0.5)
        raw.config_set("maxmemory", 0)
        client.push([large(request) for request in requests[2:]])
        assert len(client.batch(1, timeout_s=60).entries) == 4


def test_fresh_groups_leave_room_for_the_round_that_the_learner_waits_for(own_redis: RedisServer) -> None:
    """The round of step 1 is not issued yet when fresh groups of 256 kB fill the memory: B = 4 of them are needed."""
    requests = [make_request(prompt_id=f"p{i}") for i in range(120)]
    again = [make_request(prompt_id=f"r{i}", purpose=Purpose.REEVALUATE, step=1) for i in range(2)]
    config = small_config(
        cadence={
            "weight_sync_interval": 1,
            "reevaluation_interval": 1,
            "max_steps_ahead": 1000,
            "wait_for_reevaluation": True,
        }
    )
    with (
        redis.Redis.from_url(own_redis.url) as raw,
        serving(new_store(own_redis.url), config) as client,
    ):
        client.enqueue(requests, cursor=120)
        raw.config_set("maxmemory", raw.info("memory")["used_memory"] + (24 << 20))
        impatient, stored = type(client)(client.url, retry_s=0.0, full_s=0.0), Counter[str]()
        with pytest.raises(FullError, match=r"buffer\.max_memory_mb"):
            stored.update(result for request in requests for result in impatient.push([large(request)]).values())
        assert stored["stored"] > 50
        impatient.reevaluate(1, again)
        assert impatient.claim("w", limit=9, policy_version=1) == again
        impatient.push([large(request) for request in again])
        results = impatient.batch(1, timeout_s=60).results
        assert {result.group_id for result in results} >= {request.request_id for request in again}


def test_requests_are_taken_and_a_state_is_restored_when_redis_is_full(own_redis: RedisServer) -> None:
    """The learner may wait for what they ask; what a restore replaces makes room for what it brings."""
    store = new_store(own_redis.url)
    empty = store.image()
    requests = [make_request(prompt_id=f"p{i}") for i in range(8)]
    with redis.Redis.from_url(own_redis.url) as raw:
        assert store.enqueue(requests[:4], cursor=4) == 4
        store.push([incoming(large_group(request)) for request in requests[:3]])
        raw.config_set("maxmemory", raw.info("memory")["used_memory"] - 1000)
        with pytest.raises(FullError):
            store.push([incoming(answer(requests[3]))])
        assert store.enqueue(requests, cursor=8) == 4
        assert store.enqueue_round(1, []) == 0
        assert store.readiness(1).round_left == 0
        assert store.claim("w", limit=1, policy_version=1) == [requests[3]]
        store.restore(empty, ())
        assert store.status().queued["fresh"] == 0
        assert store.readiness(1).num_fresh == 0


def test_a_learner_resumes_from_a_restore_that_was_cut_off(own_redis: RedisServer) -> None:
    store = new_store(own_redis.url)
    request = make_request()

    def cut_off() -> Iterator[tuple[str, bytes]]:
        raise ConnectionResetError
        yield

    with serving(store, small_config()) as client:
        client.enqueue([request])
        client.push([pack_group(answer(request))])
        snapshot = client.snapshot()
        with pytest.raises(ConnectionResetError):
            store.restore(store.image(), cut_off())
        with pytest.raises(UnavailableError, match="snapshot"):
            type(client)(client.url, retry_s=0.0).status()
        checkpoint = SimpleNamespace(state=SimpleNamespace(step=0), read_buffer=lambda: snapshot)
        resume_buffer(cast(SharedBuffer, client), cast(Checkpoint, checkpoint))
        assert client.status().fresh_ready == 1
        assert client.snapshot() == snapshot


def test_batches_that_wait_for_a_checkpoint_and_fill_redis_are_named_and_end_with_it(own_redis: RedisServer) -> None:
    requests = [make_request(prompt_id=f"p{i}") for i in range(12)]
    config = small_config(cadence={"max_steps_ahead": 1000}, checkpoint={"every": 50})
    with (
        redis.Redis.from_url(own_redis.url) as raw,
        serving(new_store(own_redis.url), config) as client,
    ):
        client.enqueue(requests, cursor=12)
        client.push([large(request) for request in requests[:8]])
        for step in (1, 2):
            client.batch(step, timeout_s=60)
            assert client.commit(step, checkpointed=0) is False, "Redis has no limit"
        raw.config_set("maxmemory", int(0.9 * raw.info("memory")["used_memory"]))
        assert client.commit(2, checkpointed=0) is True, "4 MB of batches"
        kept = r"it may reject .*or checkpoint more often: batches 1-2 wait .*checkpoint\.every=50"
        with pytest.raises(DeadlineError, match=kept):
            client.batch(3, timeout_s=0.5)
        assert client.commit(2, checkpointed=2) is False
        wait_until(lambda: client.push([large(requests[8])]) == {"g-p8": "stored"})
        with pytest.raises(DeadlineError, match="1/4 fresh groups"):
            client.batch(3, timeout_s=0.5)


def test_a_redis_that_cannot_write_its_disk_is_a_storage_error(own_redis: RedisServer, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    with (
        redis.Redis.from_url(own_redis.url) as raw,
        serving(new_store(own_redis.url), small_config()) as client,
    ):
        request = make_request(prompt_id="a")
        client.enqueue([request, make_request(prompt_id="b")], cursor=2)
        client.push([pack_group(answer(request))])
        raw.config_set("save", "3600 1")
        raw.config_set("dir", str(gone))
        shutil.rmtree(gone)
        raw.bgsave()
        while raw.info("persistence")["rdb_last_bgsave_status"] == "ok":
            time.sleep(0.05)
        with pytest.raises(StorageError):
            client.push([pack_group(answer(make_request(prompt_id="b")))])
        assert client.status().fresh_ready == 1
        raw.config_set("dir", str(tmp_path))
        raw.bgsave()
        while raw.info("persistence")["rdb_last_bgsave_status"] != "ok":
            time.sleep(0.05)
        assert client.push([pack_group(answer(make_request(prompt_id="b")))]) == {"g-b": "stored"}


def test_a_wrong_password_is_a_configuration_error(own_redis: RedisServer) -> None:
    with redis.Redis.from_url(own_redis.url) as raw:
        raw.config_set("requirepass", "right")
    url = own_redis.url.replace("redis://", "redis://:hunter2@")
    with pytest.raises(ConfigError, match=r"buffer\.redis_url") as error:
        new_store(url).status()
    assert "hunter2" not in str(error.value)
