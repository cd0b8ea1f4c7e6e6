"""Large bodies that go past the event loop: whatever a peer does in the middle of one, others do not notice."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import cast
from urllib.parse import urlsplit

import pytest

from bapo.clients import BufferClient
from bapo.gate import BODY_PAUSE_S
from bapo.wire import pack_batch_start, pack_group, unpack_batch
from buffer_service.bodies import Intake
from buffer_service.direct import LARGE_BYTES, Direct, receive
from buffer_service.threads import MOST_THREADS
from tests.buffer_app import serving, small_config
from tests.buffer_setup import answer, new_store
from tests.factories import make_group, make_request
from tests.patience import wait_until

TOKENS = 40_000
"""Per group: a frame of 320 kB, more than what comes along with the headers."""
NAMES = ("a", "b", "c", "d")


@pytest.fixture
def client(redis_url: str) -> Iterator[BufferClient]:
    with serving(new_store("redis", redis_url, run="direct"), small_config()) as client:
        yield client


def frame_of(name: str, tokens: int = TOKENS) -> bytes:
    request = make_request(prompt_id=name)
    group = make_group(
        rewards="11000000", prompt=request.prompt, group_id=request.request_id, lengths=[tokens // 8] * 8, worker_id="w"
    )
    return pack_group(group)


def asked(client: BufferClient, *names: str) -> list[bytes]:
    client.enqueue([make_request(prompt_id=name) for name in names])
    return [frame_of(name) for name in names]


def connect(client: BufferClient) -> socket.socket:
    parts = urlsplit(client.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=60)


def head(size: int, *more: str) -> bytes:
    return "\r\n".join(["POST /groups HTTP/1.1", "Host: x", f"Content-Length: {size}", *more, "", ""]).encode()


def reply(connection: socket.socket) -> tuple[int, bytes]:
    """(status, body) of the next answer on the connection."""
    file = connection.makefile("rb", buffering=0)
    status, length = int(file.readline().split()[1]), 0
    while (line := file.readline().strip()) != b"":
        if line.lower().startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    body = b""
    while len(body) < length:
        body += file.read(length - len(body))
    return status, body


def test_the_frames_of_these_tests_are_large() -> None:
    assert len(frame_of("a")) > 4 * LARGE_BYTES


def test_a_body_that_comes_in_pieces_is_stored(client: BufferClient) -> None:
    (frame,) = asked(client, "a")
    with connect(client) as connection:
        connection.sendall(head(len(frame)))
        for first in range(0, len(frame), 100_000):
            connection.sendall(frame[first : first + 100_000])
            time.sleep(0.05)  # longer than a thread waits
        assert reply(connection) == (200, b'{"groups":{"g-a":"stored"}}')


def test_a_connection_goes_on_after_a_large_body(client: BufferClient) -> None:
    first, second = asked(client, "a", "b")
    with connect(client) as connection:
        for frame in (first, second):
            connection.sendall(head(len(frame)) + frame)
            assert reply(connection)[0] == 200
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert reply(connection) == (200, b"ok\n")


def test_a_request_right_behind_a_large_body_is_answered_too(client: BufferClient) -> None:
    (frame,) = asked(client, "a")
    with connect(client) as connection:
        connection.sendall(head(len(frame)) + frame + b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert reply(connection)[0] == 200
        assert reply(connection) == (200, b"ok\n")


def test_a_large_body_that_is_refused_leaves_the_connection_usable(client: BufferClient) -> None:
    (frame,) = asked(client, "a")
    broken = b"XXXX" + frame[4:]
    with connect(client) as connection:
        connection.sendall(head(len(broken)) + broken)
        status, body = reply(connection)
        assert (status, json.loads(body)["error"]) == (422, "ContractError")
        connection.sendall(head(len(frame)) + frame)
        assert reply(connection) == (200, b'{"groups":{"g-a":"stored"}}')


def test_a_body_that_ends_early_is_refused_and_nothing_is_stored(client: BufferClient) -> None:
    (frame,) = asked(client, "a")
    with connect(client) as connection:
        connection.sendall(head(len(frame)) + frame[:200_000])
        connection.shutdown(socket.SHUT_WR)
        status, body = reply(connection)
    assert status == 411
    assert json.loads(body)["message"] == f"the body is cut off: 200000 of {len(frame)} bytes"
    assert client.status().fresh_ready == 0
    assert client.push([frame]) == {"g-a": "stored"}


def test_a_body_that_waits_for_100_continue_is_stored(client: BufferClient) -> None:
    (frame,) = asked(client, "a")
    with connect(client) as connection:
        connection.sendall(head(len(frame), "Expect: 100-continue"))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(frame)
        assert reply(connection)[0] == 200


def test_senders_that_stop_in_the_middle_hold_no_thread(client: BufferClient) -> None:
    frames = asked(client, "a", "b")
    with ExitStack() as stack:
        for _ in range(2 * MOST_THREADS):
            connection = stack.enter_context(connect(client))
            connection.sendall(head(len(frames[0])) + frames[0][:100_000])
        time.sleep(0.3)
        begun = time.monotonic()
        assert client.push([frames[1]]) == {"g-b": "stored"}
        assert time.monotonic() - begun < 0.8 * BODY_PAUSE_S, "not when the others are given up"
    wait_until(lambda: client.status().fresh_ready == 1)


def test_a_sender_that_trickles_keeps_no_thread() -> None:
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)  # as the sockets of an event loop are
        ended = threading.Event()

        def trickle() -> None:
            for _ in range(4000):
                writer.send(b"x")
                if ended.wait(0.002):
                    return

        sender = threading.Thread(target=trickle)
        sender.start()
        received = sum(receive(reader.fileno(), memoryview(bytearray(4000))))
        ended.set()
        sender.join(60)
    assert 0 < received < 2000


class Alone:
    """A connection without a server."""

    def __init__(self, reader: socket.socket) -> None:
        self._reader = reader

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        descriptor = os.dup(self._reader.fileno())
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def take_begun(self) -> bytes:
        return b""


def test_a_body_that_is_given_up_while_a_thread_reads_it_is_not_read_from_elsewhere() -> None:
    """At its end the server cancels what still runs; the numbers of closed descriptors are given away at once."""
    reader, writer = socket.socketpair()
    begun, go_on = threading.Event(), threading.Event()

    class Waiting:
        def came(self, body: memoryview) -> None:
            begun.set()
            go_on.wait(60)

        def paused(self) -> None:
            pass

    async def cancelled() -> Intake[None]:
        intake: Intake[None] = Intake(cast(Direct, Alone(reader)), 1000, lambda _: None, watcher=Waiting())
        running = asyncio.ensure_future(intake.run())
        await asyncio.to_thread(begun.wait, 60)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return intake

    with reader, writer:
        reader.setblocking(False)
        writer.send(b"of the body")
        intake = asyncio.run(cancelled())
        pairs = [socket.socketpair() for _ in range(8)]  # one has the number of the descriptor that was closed
        others = [other for pair in pairs for other in pair]
        for other in others:
            other.setblocking(False)
            other.send(b"another's")
        go_on.set()
        time.sleep(0.5)
        left = [len(select.select([other], [], [], 0)[0]) for other in others]
        for other in others:
            other.close()
    assert left == [1] * 16
    assert intake._filled == len(b"of the body")


def test_a_slow_reader_gets_its_batch_whole(client: BufferClient) -> None:
    frames = asked(client, "a", "b", "c", "d")
    client.push(frames)
    with connect(client) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        connection.sendall(b"POST /batches/1 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        time.sleep(0.5)  # both socket buffers are full by now
        status, body = reply(connection)
    assert status == 200
    batch = unpack_batch(body)
    assert [entry.group.group_id for entry in batch.entries] == ["g-a", "g-b", "g-c", "g-d"]
    assert body.endswith(b"".join(frames))
    assert len(body) > len(pack_batch_start({}, 0)) + sum(map(len, frames))


def test_a_reader_that_leaves_in_the_middle_of_a_batch_harms_nobody(client: BufferClient) -> None:
    client.push(asked(client, "a", "b", "c", "d"))
    with connect(client) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        connection.sendall(b"POST /batches/1 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        connection.recv(1000)
    assert len(client.batch(1, timeout_s=60).entries) == 4


def test_small_groups_still_travel_with_their_headers(client: BufferClient) -> None:
    request = make_request(prompt_id="small")
    client.enqueue([request])
    assert client.push([pack_group(answer(request))]) == {"g-small": "stored"}


def test_nothing_comes_between_the_pieces_of_a_batch_when_the_service_ends(redis_url: str) -> None:
    """The event loop gives up the request; the thread that sends its answer goes on until the process ends."""
    with ExitStack() as stack:
        with serving(new_store("redis", redis_url, run="direct"), small_config()) as client:
            asked(client, *NAMES)
            frames = [frame_of(name, 10 * TOKENS) for name in NAMES]
            client.push(frames)
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            connection.settimeout(60)
            parts = urlsplit(client.url)
            connection.connect((parts.hostname, parts.port))
            connection.sendall(b"POST /batches/1 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            time.sleep(0.5)  # both socket buffers are full by now
        status, body = reply(connection)
    assert status == 200
    assert body.endswith(b"".join(frames))
