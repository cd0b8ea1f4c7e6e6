"""Lengths that lie, bodies that stop, requests inside requests: byte for byte over a socket, small and large bodies."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest
import urllib3

from bapo.core.codec import pack_group
from bapo.core.errors import Refusal
from bapo.transport import http_guard
from bapo.transport.buffer_client import BufferClient
from tests.support.buffer import answer, new_store
from tests.support.buffer_app import serving, small_config
from tests.support.factories import make_request
from tests.support.wait import wait_until

LARGE = 200_000
"""Beyond what is read with the headers: such a body goes to a worker thread straight from the socket."""
STATUS = b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def client(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[BufferClient]:
    """A client of a service that was asked for one group, and is impatient."""
    monkeypatch.setattr(http_guard, "BODY_PAUSE_S", 2.0)
    with serving(new_store(redis_url), small_config()) as found:
        found.enqueue([make_request(prompt_id="a")])
        yield found


def exchange(client: BufferClient, sent: bytes, *, half_close: bool = False) -> bytes:
    """All that comes back until the service closes, or says nothing for ten seconds."""
    host, _, port = client.url.removeprefix("http://").partition(":")
    heard = b""
    with socket.create_connection((host, int(port)), timeout=10.0) as connection, suppress(OSError):
        connection.sendall(sent)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        while more := connection.recv(1 << 16):
            heard += more
    return heard


def push(body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /groups HTTP/1.1", b"Host: x", *(headers or [b"Content-Length: %d" % len(body)]), b"", b""]
    return b"\r\n".join(lines) + body


def statuses(heard: bytes) -> list[int]:
    return [int(part[:3]) for part in heard.split(b"HTTP/1.1 ")[1:]]


FRAME = pack_group(answer(make_request(prompt_id="a")))


def is_sound(client: BufferClient) -> bool:
    """Nothing was stored, and a good push works."""
    return client.status().fresh_ready == 0 and client.push([FRAME]) == {"g-a": "stored"}


@pytest.mark.parametrize("size", [10, LARGE])
def test_a_body_that_stops_is_given_up(client: BufferClient, size: int) -> None:
    assert statuses(exchange(client, push(b"x" * (size // 2), b"Content-Length: %d" % size))) in ([408], [])
    assert (
        exchange(client, push(b"x" * (size // 2), b"Content-Length: %d" % size), half_close=True)[:12]
        != b"HTTP/1.1 500"
    )
    assert is_sound(client)


@pytest.mark.parametrize("size", [10, LARGE])
def test_bytes_behind_a_body_are_the_next_request(client: BufferClient, size: int) -> None:
    last = STATUS.replace(b"Host: x", b"Host: x\r\nConnection: close")
    assert statuses(exchange(client, push(b"x" * size) + last)) == [422, 200]
    assert is_sound(client)


@pytest.mark.parametrize("size", [10, LARGE])
def test_a_length_that_is_too_short_leaves_a_broken_request(client: BufferClient, size: int) -> None:
    heard = statuses(exchange(client, push(b"x" * size + b" \r\n\r\n", b"Content-Length: %d" % size)))
    assert heard in ([422, 400], [422], [400])
    assert is_sound(client)


@pytest.mark.parametrize(
    "headers",
    [
        [b"Content-Length: 10", b"Content-Length: 20"],
        [b"Content-Length: 10", b"Transfer-Encoding: chunked"],
        [b"Content-Length: -1"],
        [b"Content-Length: 1e3"],
        [b"Content-Length: 0x10"],
        [b"Content-Length: \xb2"],
        [b"Content-Length: 99999999999999999999999"],
        [b"Content-Length :10"],
        [b"X: a\rb", b"Content-Length: 10"],
        [b"X: \0", b"Content-Length: 10"],
    ],
)
def test_two_readings_of_one_request_are_refused(client: BufferClient, headers: list[bytes]) -> None:
    heard = exchange(client, push(b"x" * 10, *headers) + STATUS)
    assert statuses(heard)[:1] in ([400], [411], [413])
    assert 200 not in statuses(heard)
    assert is_sound(client)


@pytest.mark.parametrize(
    "noise", [b"\0" * 100, b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n" * 50]
)
def test_what_is_no_http_1_1_ends_the_connection(client: BufferClient, noise: bytes) -> None:
    assert statuses(exchange(client, noise)) in ([400], [404, 400], [])  # h11 takes "PRI * HTTP/2.0" for a request
    assert is_sound(client)


def test_a_connection_that_asked_for_an_upgrade_is_closed_when_its_peer_has_gone(client: BufferClient) -> None:
    host, _, port = client.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10.0) as connection:
        connection.sendall(STATUS)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        connection.sendall(push(b"x", b"Connection: upgrade", b"Upgrade: websocket", b"Content-Length: %d" % LARGE))
        assert client.status().fresh_ready == 0
        ours = connection.getsockname()[1]
    wait_until(lambda: ours not in peers(), what="the service has closed its end")
    assert is_sound(client)


def peers() -> set[int]:
    """Ports of those whom this process, which the service is a part of, has connections with."""
    return {each.raddr.port for each in psutil.Process().net_connections("tcp") if each.raddr}


CHUNKS = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"


@pytest.mark.parametrize("path", [b"/healthz", b"/requests"], ids=["answered at once", "its body is awaited"])
@pytest.mark.parametrize("piece", [b"x-a: " + b"a" * 1000 + b"\r\n", b"a" * 1000], ids=["many", "one without an end"])
def test_headers_behind_a_body_of_chunks_are_bounded_like_those_before_it(
    client: BufferClient, path: bytes, piece: bytes
) -> None:
    address = client.url.removeprefix("http://").split(":")
    sent = 0
    with socket.create_connection((address[0], int(address[1])), timeout=60.0) as connection, suppress(OSError):
        connection.sendall(CHUNKS % path)
        while sent < 20_000_000:
            connection.sendall(100 * piece)
            sent += 100 * len(piece)
    assert sent < 15_000_000  # the rest found no reader
    assert is_sound(client)


def test_a_few_headers_behind_a_body_of_chunks_do_no_harm(client: BufferClient) -> None:
    body = b'{"step": 3, "policy_version": 2}'
    lines = [b"PUT /progress HTTP/1.1", b"Host: x", b"Content-Type: application/json", b"Transfer-Encoding: chunked"]
    chunks = b"%x\r\n%b\r\n0\r\nX-Sum: 7\r\n\r\n" % (len(body), body)
    heard = exchange(
        client, b"\r\n".join(lines) + b"\r\n\r\n" + chunks + STATUS.replace(b"x\r", b"x\r\nConnection: close\r")
    )
    assert statuses(heard) == [204, 200]
    assert client.progress().step == 3


MB = 1 << 20
RESTORE = b"POST /restore HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n"
SELECTOR = b"PUT /selector/1?through=0 HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
CASES = [(RESTORE, 512 * MB), (SELECTOR, 256 * MB), (RESTORE, 16384 * MB)]


@pytest.mark.parametrize(("head", "declared"), CASES, ids=["restore", "selector", "the most"])
def test_memory_follows_what_came_not_what_was_declared(client: BufferClient, head: bytes, declared: int) -> None:
    address = client.url.removeprefix("http://").split(":")
    process = psutil.Process()
    before = process.memory_info().rss
    with socket.create_connection((address[0], int(address[1])), timeout=60.0) as connection:
        connection.sendall(head % declared + b"x" * MB)
        for _ in range(3):  # the event loop has read the head by then, and answers others
            assert client.status().fresh_ready == 0
        assert process.memory_info().rss - before < 100 * MB
    assert is_sound(client)


@pytest.mark.parametrize("head", [RESTORE, SELECTOR], ids=["restore", "selector"])
def test_a_sender_that_leaves_in_the_middle_is_a_refusal_and_no_failure(
    client: BufferClient, head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    exchange(client, head % (2 * MB) + b"x" * MB, half_close=True)
    wait_until(lambda: refused(client, Refusal.LENGTH) == 1, what="the service has counted the body that was cut off")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert is_sound(client)


def refused(client: BufferClient, reason: Refusal) -> float:
    """How many requests the service has counted as refused for this reason."""
    text = urllib3.request("GET", client.url + "/metrics", retries=False).data.decode()
    found = re.search(rf'bapo_refused_requests_total\{{reason="{reason}"\}} (\S+)', text)
    return float(found[1]) if found else 0.0
