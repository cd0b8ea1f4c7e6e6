"""Two buffer services in front of one Redis: either may die at any moment, and nobody notices but the log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from bapo.config.load import dump_toml
from bapo.core.codec import pack_group
from bapo.core.errors import UnavailableError
from bapo.core.types import Progress
from bapo.runtime.rank_environment import free_port
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport import buffer_client
from bapo.transport.buffer_client import BufferClient
from buffer_service.store.redis import connection
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.run_image import EMPTY
from tests.process.test_buffer_process import command
from tests.support.buffer import PuttingRedisStore as RedisStore
from tests.support.buffer import answer, new_store, stored
from tests.support.buffer_app import serving, small_config
from tests.support.factories import make_request
from tests.support.network import Network
from tests.support.redis_server import RedisServer
from tests.support.suspended import stopped
from tests.support.wait import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_STEPS = 40
LONGEST_WAIT_S = 20.0
"""Far above what a fail-over takes, far below any deadline: a stall would be longer."""


class Replica:
    """One service process on a port of its own."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # Short leases: a claim whose answer dies with its service leaves some that nobody knows of.
        settings = {"port": self.port, "lease_s": 5.0}
        config = small_config(run={"name": "replicas"}, cadence={"max_steps_ahead": 1000}, buffer=settings)
        self._command = command(RunDirectory.create(folder, dump_toml(config)), "--redis-url", redis_url)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it serves."""
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        BufferClient(self.url, retry_s=0.0).wait_ready(60)

    def stopped(self) -> AbstractContextManager[None]:
        """It stands still."""
        return stopped(self._process)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Replica]]:
    with ExitStack() as stack:
        (tmp_path / "redis").mkdir()
        server = RedisServer(tmp_path / "redis", aof=True).start()
        stack.callback(server.stop)
        both = [Replica(tmp_path / f"replica-{i}", server.url) for i in range(2)]
        for replica in both:
            stack.callback(replica.kill)
            replica.start()
        yield both


@pytest.fixture
def peers(tmp_path: Path, replicas: list[Replica]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Two workers and a learner; each begins with another replica."""
    urls = [replica.url for replica in replicas]
    orders = {"worker-1": urls, "worker-2": urls[::-1], "learner": urls}
    started: dict[str, subprocess.Popen[bytes]] = {}
    for name, order in orders.items():
        role, argument = name.partition("-")[0], str(NUM_STEPS) if name == "learner" else name
        arguments = [role, ",".join(order), str(tmp_path / f"{name}.jsonl"), argument]
        script = [sys.executable, str(REPOSITORY / "tests/support/replica_peers.py"), *arguments]
        started[name] = subprocess.Popen(script, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    yield started
    for process in started.values():
        process.kill()
        process.wait()


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_either_of_two_replicas_may_be_killed(
    tmp_path: Path, replicas: list[Replica], peers: dict[str, subprocess.Popen[bytes]]
) -> None:
    ledger = tmp_path / "learner.jsonl"
    requests = [make_request(prompt_id=f"p{i:03d}", request_id=f"f-{i:03d}") for i in range(4 * NUM_STEPS)]
    scheduler = BufferClient(f"{replicas[1].url},{replicas[0].url}")
    scheduler.enqueue(requests[: 2 * NUM_STEPS], cursor=2 * NUM_STEPS)
    wait_until(lambda: len(lines_of(ledger)) >= 5)
    replicas[0].kill()
    scheduler.enqueue(requests, cursor=4 * NUM_STEPS)
    wait_until(lambda: len(lines_of(ledger)) >= 15)
    replicas[0].start()
    replicas[1].kill()
    wait_until(lambda: len(lines_of(ledger)) >= 25)
    replicas[1].start()
    replicas[0].kill()
    assert peers["learner"].wait(60) == 0

    steps = lines_of(ledger)
    assert [line["step"] for line in steps] == list(range(1, NUM_STEPS + 1))
    consumed = Counter(group_id for line in steps for group_id in line["fresh"])
    assert consumed == Counter(request.request_id for request in requests), "each fresh group is trained exactly once"
    assert max(line["waited_s"] for line in steps) < LONGEST_WAIT_S
    results = [result for name in ("worker-1", "worker-2") for result in lines_of(tmp_path / f"{name}.jsonl")]
    acknowledged = {group_id for result in results for group_id in result}
    assert acknowledged == consumed.keys()
    assert all(peers[name].poll() is None for name in ("worker-1", "worker-2")), "no worker has noticed"


def test_what_a_replica_that_stood_still_finds_in_its_socket_sets_nothing_back(
    replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner has had it done by the other one, and gone on: a restore would delete what came since."""
    monkeypatch.setattr(buffer_client, "SNAPSHOT_WAIT_S", 0.5)
    slow, other = replicas[0], BufferClient(replicas[1].url)
    snapshot = other.snapshot()
    learners = [BufferClient(f"{slow.url},{other.url}", timeout_s=1.0, retry_s=0.0) for _ in range(3)]
    with slow.stopped():
        learners[0].restore(snapshot)
        learners[1].resume(0)
        with pytest.raises(UnavailableError):  # of a learner that is killed
            BufferClient(slow.url, timeout_s=0.5, retry_s=0.0).report_progress(Progress(step=9, policy_version=9))
        assert {learner.url for learner in learners[:2]} == {other.url}
        requests = [make_request(prompt_id=f"p{i}") for i in range(6)]
        other.enqueue(requests, cursor=6)
        other.report_progress(Progress(step=1, policy_version=1))
        claimed = other.claim("w", limit=6, policy_version=1)
        other.push([pack_group(answer(request)) for request in claimed[:4]])
        assert len(other.batch(1, timeout_s=60).entries) == 4
        before = other.status()
    BufferClient(slow.url).wait_ready(60)
    time.sleep(0.5)  # what was there has been answered, to nobody
    after = other.status()
    assert (after.assembled_step, after.step, after.leased) == (before.assembled_step, before.step, before.leased)
    assert (after.assembled_step, after.step, after.leased["fresh"]) == (1, 1, 2)


@pytest.mark.parametrize("what", ["resume", "restore"])
def test_what_comes_late_from_a_replica_whose_way_to_redis_was_cut_sets_nothing_back(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The cable is mended when the other replica has done it and the run has gone on."""
    monkeypatch.setattr(connection, "ANSWER_TIMEOUT_S", 0.5)
    network = Network()
    try:
        host, port = network.add("redis", ("127.0.0.1", redis_server.port))
        urls = (f"redis://{host}:{port}/0", redis_server.url)
        cut_off, other = (RedisStore(RedisLink(url), "late", lease_s=60, max_attempts=3) for url in urls)
        calls = {"resume": lambda store: store.resume(0), "restore": lambda store: store.restore(EMPTY, ())}
        other.restore(EMPTY, ())
        latest = cut_off._link.latest_ms()
        monkeypatch.setattr(cut_off._link, "latest_ms", lambda: latest)  # the cable was pulled behind this answer
        cut_off._link.client.ping()
        network.set("redis", "frozen")
        with pytest.raises(UnavailableError):
            calls[what](cut_off)
        calls[what](other)
        other.report(Progress(step=3, policy_version=3))
        stored(other, "abcd")
        time.sleep(0.5)
        network.set("redis", "open")
        time.sleep(0.5)
        status = other.status()
        assert (status.step, status.policy_version, status.fresh_ready) == (3, 3, 4)
        with pytest.raises(UnavailableError, match="received the command after its deadline"):
            calls[what](cut_off)
        monkeypatch.undo()
        calls[what](cut_off)
    finally:
        network.close()


def test_a_client_stays_with_the_replica_that_answers(redis_url: str) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    with serving(new_store(redis_url), small_config()) as there:
        client = BufferClient(f" {away}/ , {there.url}", retry_s=0.0)
        assert client.enqueue([make_request()], cursor=1) == 1
        assert client.url == there.url
        assert client.status().queued["fresh"] == 1
    with pytest.raises(UnavailableError):
        client.status()


def test_a_call_waits_for_whichever_replica_comes_back_first(redis_url: str) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    store, found = new_store(redis_url), []
    with serving(store, small_config()) as there:
        url = there.url
    client = BufferClient(f"{away},{url}", retry_s=30.0)
    caller = threading.Thread(target=lambda: found.append(client.status()))
    caller.start()
    time.sleep(0.3)
    assert not found
    config = small_config()
    with serving(store, config, port=int(url.rpartition(":")[2])):
        caller.join(60)
    assert len(found) == 1
