"""A client that was made before a fork, as data loaders do it, works in the parent and in the child."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bapo.transport.buffer_client import BufferClient, ClaimKeys
from tests.support.wait import PATIENCE_S

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
