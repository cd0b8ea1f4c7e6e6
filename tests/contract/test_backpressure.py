"""Backpressure: a full buffer slows workers before they send, drops nothing, and never starves the learner."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import redis

from bapo.core.codec import pack_group
from bapo.core.errors import FullError
from bapo.core.types import Purpose, RolloutRequest
from bapo.transport.buffer_client import BufferClient
from buffer_service.store.redis.store import RedisStore
from tests.support.buffer import answer, new_store
from tests.support.buffer_app import serving, small_config
from tests.support.factories import make_request
from tests.support.raw_push import raw_push
from tests.support.wait import wait_until

FREE = {"cadence": {"max_steps_ahead": 1000}}


def requests_of(number: int, *, first: int = 0) -> list[RolloutRequest]:
    names = [f"p{i:03d}" for i in range(first, first + number)]
    return [make_request(prompt_id=name, request_id=f"f-{name}") for name in names]


def frames_of(requests: list[RolloutRequest], *, version: int = 1) -> list[bytes]:
    return [pack_group(answer(request, "11000000", version)) for request in requests]


def filled(client: BufferClient, number: int) -> list[RolloutRequest]:
    """Ask for so many groups and push them."""
    requests = requests_of(number)
    client.enqueue(requests)
    assert set(client.push(frames_of(requests)).values()) == {"stored"}
    return requests


def impatient(client: BufferClient) -> BufferClient:
    return BufferClient(client.url, retry_s=0.0, full_s=0.0)


def test_a_full_buffer_is_asked_before_frames_are_written(redis_url: str) -> None:
    store = new_store(redis_url)
    with serving(store, small_config(buffer={"max_fresh_groups": 4}, **FREE)) as client:
        filled(client, 4)
        more = requests_of(1, first=4)
        client.enqueue(more)
        with pytest.raises(FullError, match=r"buffer\.max_fresh_groups = 4"):
            impatient(client).push(frames_of(more))
        with redis.Redis.from_url(redis_url) as raw:
            assert raw.keys("*:incoming:*") == []
        reply = raw_push(client.url, frames_of(more))
        assert (reply.status, reply.headers["retry-after"], reply.json()["retry"]) == (429, "1", True)


def test_frames_that_found_no_room_are_not_written_again(redis_url: str) -> None:
    """The buffer was full when the heads came: they are pushed again, and the frames wait in Redis."""
    store = new_store(redis_url)
    with serving(store, small_config(buffer={"max_fresh_groups": 4}, **FREE)) as client:
        filled(client, 3)
        mine = requests_of(1, first=3)
        client.enqueue(mine)
        with redis.Redis.from_url(redis_url) as raw:
            raw.config_resetstat()
            waiting = BufferClient(client.url)
            waiting._pusher._room_until = float("inf")  # it was told of room a moment ago
            others = requests_of(1, first=4)
            client.enqueue(others)
            assert client.push(frames_of(others)) == {"f-p004": "stored"}
            pushing = threading.Thread(target=lambda: waiting.push(frames_of(mine)))
            pushing.start()
            wait_until(lambda: len(raw.keys("*:incoming:*")) == 1)
            client.batch(1, timeout_s=60)
            pushing.join(60)
            assert raw.info("commandstats")["cmdstat_psetex"]["calls"] == 2
    assert store.records(["f-p003"]) != [None]


def test_reevaluations_and_evaluations_are_taken_and_handed_out_when_it_is_full(store: RedisStore) -> None:
    with serving(store, small_config(buffer={"max_fresh_groups": 4}, **FREE)) as client:
        filled(client, 4)
        fresh = requests_of(1, first=4)[0]
        others = [
            make_request(prompt_id="r", request_id="r1-r", purpose=Purpose.REEVALUATE, step=1),
            make_request(prompt_id="e", request_id="e", purpose=Purpose.EVALUATE, label="cd@1"),
        ]
        client.enqueue([fresh, others[1]])
        client.reevaluate(1, [others[0]])
        assert client.claim("w", limit=9, policy_version=1) == others
        with pytest.raises(FullError):
            impatient(client).push(frames_of([fresh, *others]))
        assert client.status().reevaluated_ready == 1, "the other groups of the same push were stored"
        assert client.status().evaluations == {"cd@1": 1}
        client.batch(1, timeout_s=60)
        assert client.claim("w", limit=9, policy_version=1) == [fresh]


def test_who_waits_for_room_is_woken_when_a_batch_is_taken(store: RedisStore) -> None:
    """Its groups are sent twice, not once a second."""
    pushed: dict[str, str] = {}
    with serving(store, small_config(buffer={"max_fresh_groups": 4}, **FREE)) as client:
        filled(client, 4)
        more = requests_of(1, first=4)
        client.enqueue(more)
        waiting = threading.Thread(target=lambda: pushed.update(client.push(frames_of(more))))
        waiting.start()
        with pytest.raises(FullError):
            impatient(client)._service.call("GET", "/room", query={"wait_s": "0.2"})
        assert waiting.is_alive()
        client.batch(1, timeout_s=60)
        waiting.join(60)
        assert pushed == {"f-p004": "stored"}
        assert client._service.call("GET", "/room").status == 204


def test_workers_wait_for_a_slow_learner_and_nothing_is_lost(store: RedisStore) -> None:
    """Three workers push one group at a time: the queue holds at most the limit and one group of each."""
    num_steps, requests = 5, requests_of(20)
    consumed: Counter[str] = Counter()
    acknowledged: Counter[str] = Counter()
    with serving(store, small_config(buffer={"max_fresh_groups": 8}, **FREE)) as client:
        client.enqueue(requests)

        def work(name: str) -> None:
            while sum(acknowledged.values()) < len(requests):
                for request in client.claim(name, limit=1, policy_version=1, wait_s=0.1):
                    acknowledged.update(list(client.push(frames_of([request]))))
                    longest.append(client.status().fresh_ready)

        longest: list[int] = []
        threads = [threading.Thread(target=work, args=(f"w{i}",)) for i in range(3)]
        for thread in threads:
            thread.start()
        for step in range(1, num_steps + 1):
            wait_until(lambda: client.status().fresh_ready >= 4)
            consumed.update(result.group_id for result in client.batch(step, timeout_s=60).results)
            client.commit(step, checkpointed=step)
        for thread in threads:
            thread.join(60)
    assert consumed == Counter(request.request_id for request in requests)
    assert acknowledged.keys() == consumed.keys()
    assert max(longest) <= 8 + 3 + 3, longest


def test_a_queue_full_of_groups_that_are_too_old_never_starves_the_learner(store: RedisStore) -> None:
    """v = 1, max_steps_ahead = 1: a group may be one step old. At step 3 all twelve groups of version 1 are too old."""
    config = small_config(
        buffer={"max_fresh_groups": 12},
        cadence={"weight_sync_interval": 1, "reevaluation_interval": 1, "max_steps_ahead": 1},
    )
    with serving(store, config) as client:
        filled(client, 12)
        for step in (1, 2):
            client.batch(step, timeout_s=60)
            client.commit(step, checkpointed=step)
        late = requests_of(8, first=12)
        client.enqueue(late)
        assert set(client.push(frames_of(late)).values()) == {"stored"}
        client.enqueue(requests_of(1, first=20))
        with pytest.raises(FullError):
            impatient(client).push(frames_of(requests_of(1, first=20)))
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                for request in client.claim("w", limit=4, policy_version=3, wait_s=0.1):
                    client.push(frames_of([request], version=3))

        worker = threading.Thread(target=work)
        worker.start()
        batch = client.batch(3, timeout_s=60)
        stop.set()
        worker.join(60)
    too_old = {result.group_id for result in batch.results if result.reason == "stale"}
    assert too_old == {request.request_id for request in (*requests_of(4, first=8), *late)}
    assert {entry.group.policy_version for entry in batch.entries} == {3}
