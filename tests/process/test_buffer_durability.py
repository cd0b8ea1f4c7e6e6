"""What survives: Redis killed with -9, the service restarted, several services at once."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import redis
import urllib3

from bapo.core.codec import pack_batch, pack_group
from bapo.core.types import Purpose, RolloutRequest
from bapo.transport.buffer_client import BufferClient
from buffer_service.state import Replacement
from buffer_service.store.redis.keys import Keys
from tests.support.buffer import an_assembly, answer, incoming, new_store, view_of
from tests.support.buffer_app import serving, small_config
from tests.support.factories import make_request
from tests.support.redis_server import RedisServer

FRESH = {"cadence": {"max_steps_ahead": 1000}}


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[RedisServer]:
    """A server of its own with an append-only file."""
    server = RedisServer(tmp_path, aof=True).start()
    yield server
    server.stop()


def requests_of(first: int, number: int) -> list[RolloutRequest]:
    return [make_request(prompt_id=f"p{i:05d}", request_id=f"fresh-{i:05d}") for i in range(first, first + number)]


def push_all(client: BufferClient, requests: list[RolloutRequest], acknowledged: set[str]) -> None:
    for request in requests:
        results = client.push([pack_group(answer(request, "11000000"))])
        assert set(results.values()) <= {"stored", "duplicate"}
        acknowledged.update(results)


def test_no_acknowledged_group_is_lost_when_redis_is_killed(durable: RedisServer) -> None:
    requests = requests_of(0, 600)
    acknowledged: list[set[str]] = [set(), set(), set()]
    with serving(new_store(durable.url), small_config(**FRESH)) as client:
        client.enqueue(requests, cursor=600)
        threads = [threading.Thread(target=push_all, args=(client, requests[i::3], acknowledged[i])) for i in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            time.sleep(0.25)
            before = set().union(*acknowledged)
            durable.kill()
            durable.start()
            with redis.Redis.from_url(durable.url) as raw:
                kept = {key.decode() for key in raw.hkeys(Keys("test")["records"])}
            assert before <= kept, f"{len(before - kept)} acknowledged groups are gone"
        for thread in threads:
            thread.join(60)
        assert set().union(*acknowledged) == {request.request_id for request in requests}
        status = client.status()
        assert (status.fresh_ready, status.queued["fresh"], status.leased["fresh"]) == (600, 0, 0)
    with redis.Redis.from_url(durable.url) as raw:
        frames = {key.decode().rpartition(":")[2] for key in raw.scan_iter("*:group:*", count=1000)}
        assert frames == {request.request_id for request in requests}


def test_batches_and_tables_survive_redis_and_service(durable: RedisServer) -> None:
    config = small_config(**FRESH)
    with serving(new_store(durable.url), config) as client:
        requests = requests_of(0, 6)
        client.enqueue(requests, cursor=6)
        client.push([pack_group(answer(r, "11000000" if i else "00000000")) for i, r in enumerate(requests)])
        first = urllib3.request("POST", client.url + "/batches/1").data
        before = (client.status().num_bad, client.status().num_high, client.hard_prompts(), client.status().cursor)
        client.claim("w", limit=1, policy_version=1)
    durable.kill()
    durable.start()
    with serving(new_store(durable.url), config) as client:
        assert urllib3.request("POST", client.url + "/batches/1").data == first
        after = (client.status().num_bad, client.status().num_high, client.hard_prompts(), client.status().cursor)
        assert after == before
        assert client.status().fresh_ready == 2


def test_nothing_is_left_of_requests_and_groups_that_nobody_needs(redis_url: str) -> None:
    store = new_store(redis_url, max_attempts=2)
    fresh = requests_of(0, 4)
    evaluations = [make_request(request_id=f"e{i}", purpose=Purpose.EVALUATE, label="cd@1") for i in range(5)]
    round_5 = make_request(prompt_id="p00000", request_id="r5", purpose=Purpose.REEVALUATE, step=5, min_version=5)
    store.enqueue([*fresh, *evaluations], cursor=4)
    store.enqueue_round(5, [round_5])
    store.claim("w", limit=4, policy_version=1)
    for _ in range(2):
        store.fail("w", "e0", reason="engine", detail="")
        store.claim("w", limit=1, policy_version=1)
    assert store.push([incoming(answer(evaluations[1])), incoming(answer(round_5, version=4))]) == ["stored", "stale"]
    store.forget("cd@1")
    assert store.push([incoming(answer(r)) for r in (*fresh, *fresh[:2])]) == ["stored"] * 4 + ["duplicate"] * 2
    old = view_of(store, 1).fresh[0]
    (asked,) = store.fresh_requests([old.group_id])
    assert asked is not None
    again = msgspec.structs.replace(asked, request_id="again")
    store.replace_stale([Replacement(result=old.result(None, "stale", 1), request=again)])
    assert store.push([incoming(answer(again)), incoming(answer(round_5, version=5))]) == ["stored", "stored"]
    group_ids = [record.group_id for record in view_of(store, 9).fresh]
    assert store.commit_assembly(an_assembly(fresh=group_ids, reevaluated=["r5"], trained=group_ids, num_stale=1))
    store.commit(1, 1)
    store.release("w")
    with redis.Redis.from_url(redis_url) as raw:
        left = {key.decode().partition("}:")[2] for key in raw.scan_iter("*")}
    assert left <= {"meta", "tables", "compositions", "counters", "done", "rounds", "workers"}


def test_two_services_at_once_assemble_one_batch_per_step(redis_url: str) -> None:
    config = small_config(**FRESH)
    with serving(new_store(redis_url), config) as one, serving(new_store(redis_url), config) as two:
        requests = requests_of(0, 40)
        one.enqueue(requests, cursor=40)
        one.push([pack_group(answer(request, "11000000")) for request in requests])
        for step in range(1, 11):
            found: list[bytes] = []
            barrier = threading.Barrier(4)

            def fetch(client: BufferClient, step: int = step) -> None:
                barrier.wait()  # noqa: B023 - the threads end within the iteration
                found.append(pack_batch(client.batch(step, timeout_s=60)))  # noqa: B023

            threads = [threading.Thread(target=fetch, args=(client,)) for client in (one, two, one, two)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert len(found) == 4
            assert len(set(found)) == 1
        assert one.status().fresh_ready == 0


def test_every_fresh_group_is_consumed_exactly_once_while_workers_push(redis_url: str) -> None:
    """Workers, two services and a learner at once; leases that end early make some groups come twice."""
    config = small_config(**FRESH)
    num_steps, consumed = 25, Counter[str]()
    stores = [new_store(redis_url, lease_s=0.2, max_attempts=1000) for _ in range(2)]
    with serving(stores[0], config) as one, serving(stores[1], config) as two:
        one.enqueue(requests_of(0, 4 * num_steps), cursor=4 * num_steps)
        stop = threading.Event()

        def work(client: BufferClient, name: str, pause_s: float) -> None:
            while not stop.is_set():
                for request in client.claim(name, limit=3, policy_version=1, wait_s=0.1):
                    time.sleep(pause_s)
                    client.push([pack_group(answer(request, "11000000", worker_id=name))])

        threads = [
            threading.Thread(target=work, args=(client, name, pause_s))
            for client, name, pause_s in ((one, "fast", 0.0), (two, "slow", 0.15), (two, "steady", 0.01))
        ]
        for thread in threads:
            thread.start()
        for step in range(1, num_steps + 1):
            batch = (one, two)[step % 2].batch(step, timeout_s=60)
            consumed.update(result.group_id for result in batch.results if result.birth == step)
            one.commit(step, checkpointed=step - step % 5)
        stop.set()
        for thread in threads:
            thread.join(60)
    assert consumed == Counter(request.request_id for request in requests_of(0, 4 * num_steps))
