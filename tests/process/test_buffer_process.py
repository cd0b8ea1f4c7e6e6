"""`python -m buffer_service`: starts, says where it listens, ends at once, refuses clearly."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bapo.config.load import dump_toml, load_resolved
from bapo.core.errors import BapoError
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.buffer_client import BufferClient
from bapo.transport.endpoints import buffer_url
from tests.support.buffer_app import small_config
from tests.support.factories import make_request
from tests.support.network import Network, needs_ipv6
from tests.support.redis_server import RedisServer
from tests.support.wait import wait_until


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    config = small_config(run={"name": "process"}, buffer={"port": 0})
    return RunDirectory.create(tmp_path / "run", dump_toml(config))


def command(run: RunDirectory, *flags: str) -> list[str]:
    where = ["--config", str(run.config_path), "--run-dir", str(run.path)]
    return [sys.executable, "-m", "buffer_service", *where, *flags]


@contextmanager
def started(run: RunDirectory, *flags: str) -> Iterator[tuple[subprocess.Popen[str], BufferClient]]:
    process = subprocess.Popen(command(run, *flags), stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: run.read_port("buffer_service") is not None or process.poll() is not None)
        client = BufferClient(buffer_url(load_resolved(run.config_path), run), retry_s=0.0)
        client.wait_ready(60)
        yield process, client
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def refused(run: RunDirectory, *flags: str) -> tuple[int, str]:
    done = subprocess.run(command(run, *flags), capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.strip().splitlines()[-1]


def test_it_announces_its_port_and_ends_at_once_when_it_is_told_to(run: RunDirectory, redis_url: str) -> None:
    with started(run, "--redis-url", redis_url) as (process, client):
        assert client.enqueue([make_request()], cursor=1) == 1

        answers: list[object] = []
        waiter = threading.Thread(
            target=lambda: answers.append(client.claim("w", limit=1, policy_version=0, wait_s=60.0))
        )
        waiter.start()
        wait_until(lambda: "w" in client.status().workers)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert time.monotonic() - begun < 30, "not at the end of the poll"
        waiter.join(60)
        assert answers == [[]]


@pytest.mark.parametrize("host", ["[::1]", "::ffff:127.0.0.1"])
def test_at_an_address_of_ipv6_it_is_found_and_finds_its_redis(host: str, tmp_path: Path, redis_url: str) -> None:
    needs_ipv6()
    config = small_config(run={"name": "six"}, buffer={"port": 0, "host": host})
    run = RunDirectory.create(tmp_path / "six", dump_toml(config))
    network, redis_port = Network(), int(redis_url.rpartition(":")[2].partition("/")[0])
    _, port = network.add("redis", ("127.0.0.1", redis_port), ("::1", 0))
    try:
        with started(run, "--redis-url", f"redis://[::1]:{port}/0") as (_, client):
            assert client.url == f"http://[{host.strip('[]')}]:{run.read_port('buffer_service')}"
            assert client.enqueue([make_request()], cursor=1) == 1
            assert len(client.claim("w", limit=1, policy_version=1)) == 1
    finally:
        network.close()


def test_a_redis_that_hangs_is_shown_as_away_before_a_scrape_is_given_up(run: RunDirectory, tmp_path: Path) -> None:
    server = RedisServer(tmp_path).start()
    try:
        with started(run, "--redis-url", server.url) as (_, client):

            def shown() -> str:
                with urllib.request.urlopen(f"{client.url}/metrics", timeout=5.0) as answer:  # as Prometheus waits
                    lines: list[str] = answer.read().decode().splitlines()
                return next(line for line in lines if line.startswith("bapo_buffer_redis_up"))

            assert shown().endswith(" 1.0")
            with server.stopped():
                assert [shown()[-4:], shown()[-4:]] == [" 0.0", " 0.0"]
            wait_until(lambda: shown().endswith(" 1.0"), what="Redis is seen again")
    finally:
        server.stop()


def test_probes_are_answered_soon_while_more_calls_wait_for_a_redis_that_hangs_than_there_are_threads(
    run: RunDirectory, tmp_path: Path
) -> None:
    """A probe of Kubernetes waits for three seconds; what it is told must not depend on how long that is."""
    server = RedisServer(tmp_path).start()
    try:
        with started(run, "--redis-url", server.url) as (_, client):
            patient = BufferClient(client.url, retry_s=0.0)
            waiting = [
                threading.Thread(target=error_of, args=(lambda name=name: patient.renew(name, ["g-p"]),))  # type: ignore[misc]
                for name in map(str, range(60))
            ]
            with server.stopped():
                for thread in waiting:
                    thread.start()
                time.sleep(0.5)  # they have all threads by now
                begun = time.monotonic()
                with pytest.raises(urllib.error.HTTPError) as found:
                    urllib.request.urlopen(f"{client.url}/readyz", timeout=60)
                assert (found.value.code, time.monotonic() - begun < 3.0) == (503, True)
                assert b"Redis" in found.value.read()
                begun = time.monotonic()
                with urllib.request.urlopen(f"{client.url}/metrics", timeout=60) as answer:
                    assert b'bapo_buffer_redis_up{run="process"} 0.0' in answer.read()
                assert time.monotonic() - begun < 5.0, "as long as Prometheus waits"
            client.wait_ready(60)
            for thread in waiting:
                thread.join(60)
    finally:
        server.stop()


def error_of(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except BapoError as error:
        return error
    return None


def test_a_service_that_is_killed_between_lease_and_answer_gives_the_same_requests_again(
    run: RunDirectory, redis_url: str
) -> None:
    network, answers = Network(), []
    where = ["--redis-url", redis_url]
    with started(run, *where) as (process, direct):
        port = int(direct.url.rpartition(":")[2])
        host, cable = network.add("cable", ("127.0.0.1", port))
        client = BufferClient(f"http://{host}:{cable}", timeout_s=120.0, retry_s=120.0)
        worker = threading.Thread(
            target=lambda: answers.append(client.claim("w", limit=9, policy_version=1, wait_s=60.0)), daemon=True
        )
        worker.start()
        wait_until(lambda: "w" in direct.status().workers)
        network.set("cable", "frozen")  # the question has passed, the answer will not
        direct.enqueue([make_request()], cursor=1)
        wait_until(lambda: direct.status().leased["fresh"] == 1)
        process.kill()
        process.wait()
    network.set("cable", "open")
    (run.path / "ports" / "buffer_service").unlink()
    with started(run, *where, "--port", str(port)) as (_, direct):
        worker.join(100.0)
        assert [[request.request_id for request in requests] for requests in answers] == [["g-p"]]
        assert direct.status().leased["fresh"] == 1
    network.close()


def test_a_port_in_use_is_one_clear_message(run: RunDirectory, redis_url: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, message = refused(run, "--redis-url", redis_url, "--port", str(port))
    assert code == 2
    assert f"the buffer service cannot listen on 127.0.0.1:{port}: Address already in use" in message


def test_no_redis_is_one_clear_message(run: RunDirectory) -> None:
    code, message = refused(run)
    assert code == 2
    assert "no Redis URL: set buffer.redis_url" in message
