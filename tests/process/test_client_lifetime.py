"""The end of a client: what it closes, in which processes it is used again, and what a cancelled wait leaves behind."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bapo.transport.buffer_client import BufferClient, ClaimKeys
from tests.support.wait import PATIENCE_S


@contextmanager
def batchless_buffer(pause_s: Callable[[str], float]) -> Iterator[str]:
    """Its URL. `pause_s` says of a call's path how long its answer takes, in seconds."""

    class Service(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            time.sleep(pause_s(self.path))
            status, body = (202, b'{"reason": "0/4"}') if "batches" in self.path else (200, b'{"accepted": 3}')
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def url() -> Iterator[str]:
    with batchless_buffer(lambda path: 0.05 if "batches" in path else 0.0) as found:
        yield found


@pytest.mark.parametrize(
    "code",
    [
        "BufferClient(url).enqueue([])",
        "client = BufferClient(url); client.enqueue([])",
        "client = BufferClient(url); client.enqueue([]); os.fork() or client.enqueue([]); os.wait()",
        "with BufferClient(url) as client: client.enqueue([])",
    ],
)
def test_no_socket_is_left_for_python_to_warn_of(url: str, code: str) -> None:
    program = f"""
import contextlib, os, sys
from bapo.transport.buffer_client import BufferClient
url = sys.argv[1]
with contextlib.suppress(ChildProcessError):
    {code}
"""
    # -X dev: warnings of resources, too
    command = [sys.executable, "-X", "dev", "-c", program, url]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stderr == ""


def test_a_client_that_was_closed_goes_on(url: str) -> None:
    with BufferClient(url) as client:
        assert client.enqueue([]) == 3
    assert client.enqueue([]) == 3


def _accepted(client: BufferClient) -> int:
    return client.enqueue([])


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_other_processes_are_given_the_client_itself(url: str, how: str) -> None:
    client = BufferClient(url, retry_s=5.0)
    assert client.enqueue([]) == 3
    with multiprocessing.get_context(how).Pool(1) as pool:
        assert pool.apply(_accepted, (client,)) == 3


def test_a_copy_of_a_client_is_one_of_its_own_with_the_same_arguments() -> None:
    client = BufferClient("http://a:1,http://b:2", retry_s=5.0, token="x" * 20, direct="off")
    for other in (pickle.loads(pickle.dumps(client)), copy.copy(client)):
        assert other._arguments == client._arguments
        assert other._claim_keys is not client._claim_keys


# -- a client that was made before a fork, as data loaders do it, works in the parent and in the child


FORK = multiprocessing.get_context("fork")


def in_child(call: Callable[[], object]) -> object:
    """What the call returns, or the error as text, in a forked process."""
    receiving, sending = FORK.Pipe(duplex=False)

    def tell() -> None:
        try:
            sending.send(call())
        except Exception as error:
            sending.send(repr(error))

    child = FORK.Process(target=tell)
    child.start()
    assert receiving.poll(PATIENCE_S), "the child does not answer"
    found: object = receiving.recv()
    child.join(PATIENCE_S)
    return found


@pytest.fixture
def server() -> Iterator[tuple[str, list[int]]]:
    """Answers every call with how many requests were released: none. Yields its URL and the callers' ports."""
    ports: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            ports.append(self.client_address[1])
            self.send_response(200)
            self.send_header("Content-Length", "14")
            self.end_headers()
            self.wfile.write(b'{"released":0}')

        def log_message(self, *args: object) -> None:
            """Quiet."""

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_address[1]}", ports
    made.shutdown()
    made.server_close()


def test_a_forked_process_has_connections_of_its_own(server: tuple[str, list[int]]) -> None:
    url, ports = server
    client = BufferClient(url)
    client.release("worker-0")
    assert in_child(lambda: client.release("worker-0")) == 0
    client.release("worker-0")
    first, childs, second = ports
    assert first == second
    assert childs != first


def test_a_forked_process_claims_under_a_name_of_its_own() -> None:
    nonces = ClaimKeys()

    def next_nonce() -> str:
        with nonces.claiming("worker-0") as nonce:
            return nonce

    before = next_nonce()
    childs = in_child(next_nonce)
    assert isinstance(childs, str)
    assert childs.partition("-")[0] != before.partition("-")[0]
    assert next_nonce() == before.replace("-1", "-2")
