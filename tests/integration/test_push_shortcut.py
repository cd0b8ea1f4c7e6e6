"""Pushes past the app, on a unix socket to Redis: same answers, same rights, and nobody waits for them."""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from bapo.clients import BufferClient
from bapo.tokens import Keyring, Role, digest
from bapo.wire import pack_group
from buffer_service import pressure, shortcut
from buffer_service.bodies import Intake
from buffer_service.shortcut import SMALL_BYTES, Headers, PushShortcut
from tests.buffer_app import serving, small_config
from tests.buffer_setup import new_store
from tests.factories import make_group, make_request
from tests.patience import wait_until
from tests.redis_server import RedisServer

SMALL, LARGE = 8, 8 * 9_000
"""Tokens of a group: the event loop stores the one by itself, a worker thread the other."""


@pytest.fixture(scope="module")
def unix_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("redis")
    server = RedisServer(folder, options=("--unixsocket", str(folder / "s"))).start()
    yield f"unix://{folder / 's'}"
    server.stop()


@pytest.fixture
def db(unix_redis: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(unix_redis) as found:
        found.flushall()
        yield found


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the bodies that went past the app. One look at the pressure is enough for a whole test."""
    found: list[int] = []
    admitted = PushShortcut.admitted_bytes

    def noting(self: PushShortcut, headers: Headers) -> int | None:
        size = admitted(self, headers)
        found.extend([size] if size else [])
        return size

    monkeypatch.setattr(PushShortcut, "admitted_bytes", noting)
    monkeypatch.setattr(pressure, "LOOK_S", 600.0)
    return found


@pytest.fixture
def client(db: redis.Redis, unix_redis: str) -> Iterator[BufferClient]:
    with serving(new_store("redis", unix_redis, run="short"), small_config()) as found:
        look(found)
        yield found


def look(client: BufferClient) -> None:
    """Make the service look at its pressure, as every claim does."""
    client.claim("looking", limit=1, policy_version=0)


def asked(client: BufferClient, name: str, tokens: int = SMALL) -> bytes:
    request = make_request(prompt_id=name)
    client.enqueue([request])
    group = make_group(
        rewards="11000000", prompt=request.prompt, group_id=request.request_id, lengths=[tokens // 8] * 8, worker_id="w"
    )
    return pack_group(group)


def push(body: bytes, *more: str, query: str = "") -> bytes:
    lines = [f"POST /groups{query} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *more, "", ""]
    return "\r\n".join(lines).encode() + body


def connect(client: BufferClient) -> socket.socket:
    parts = urlsplit(client.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


def reply(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    file = connection.makefile("rb", buffering=0)
    status, headers = int(file.readline().split()[1]), {}
    while (line := file.readline().strip()) != b"":
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    body = b""
    while len(body) < int(headers["content-length"]):
        body += file.read(int(headers["content-length"]) - len(body))
    return status, headers, body


@pytest.mark.parametrize("tokens", [SMALL, LARGE])
def test_the_answer_is_the_one_of_the_ordinary_way(client: BufferClient, tokens: int, taken: list[int]) -> None:
    first, second = asked(client, "a", tokens), asked(client, "b", tokens)
    assert (len(first) > SMALL_BYTES) is (tokens == LARGE)
    with connect(client) as connection:
        connection.sendall(push(first))
        short = reply(connection)
        connection.sendall(push(second, query="?fresh=true"))
        ordinary = reply(connection)
    assert taken == [len(first)]
    assert short[0] == ordinary[0] == 200
    assert (short[2], ordinary[2]) == (b'{"groups":{"g-a":"stored"}}', b'{"groups":{"g-b":"stored"}}')
    assert short[1].keys() == ordinary[1].keys()
    assert short[1]["content-type"] == ordinary[1]["content-type"]


@pytest.mark.parametrize("tokens", [SMALL, LARGE])
def test_a_refusal_is_the_one_of_the_ordinary_way(client: BufferClient, tokens: int) -> None:
    frame = asked(client, "a", tokens)
    broken = frame[:-4] + b"\x00\x00\xc0\x7f"  # the last log-prob is NaN
    with connect(client) as connection:
        connection.sendall(push(broken))
        short = reply(connection)
        connection.sendall(push(broken, query="?fresh=true"))
        ordinary = reply(connection)
        connection.sendall(push(frame))
        assert reply(connection)[0] == 200
    assert (short[0], short[2]) == (ordinary[0], ordinary[2])
    assert (short[0], json.loads(short[2])["error"]) == (422, "ContractError")


def test_pushes_in_one_breath_are_answered_in_their_order(client: BufferClient) -> None:
    frames = [asked(client, name) for name in "abc"]
    with connect(client) as connection:
        connection.sendall(b"".join(push(frame) for frame in frames))
        bodies = [reply(connection)[2] for _ in frames]
    assert bodies == [b'{"groups":{"g-%b":"stored"}}' % name for name in (b"a", b"b", b"c")]


def test_a_small_body_in_two_pieces_is_stored(client: BufferClient) -> None:
    frame = asked(client, "a")
    with connect(client) as connection:
        whole = push(frame)
        connection.sendall(whole[:-100])
        time.sleep(0.1)
        connection.sendall(whole[-100:])
        assert reply(connection)[0] == 200
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert reply(connection)[2] == b"ok\n"


@pytest.mark.parametrize("tokens", [SMALL, LARGE])
def test_while_redis_keeps_a_push_waiting_others_are_answered(
    client: BufferClient, db: redis.Redis, tokens: int
) -> None:
    frame, first = asked(client, "a", tokens), asked(client, "b")
    client.push([first])  # connections are open by now
    with connect(client) as pushing, connect(client) as other:
        db.client_pause(60_000, all=False)  # nothing is written
        pushing.sendall(push(frame))
        other.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert reply(other)[2] == b"ok\n"
        assert not select.select([pushing], [], [], 0.1)[0]
        db.client_unpause()
        assert reply(pushing)[2] == b'{"groups":{"g-a":"stored"}}'


def test_a_push_whose_last_group_is_malformed_leaves_nothing_in_redis(client: BufferClient, db: redis.Redis) -> None:
    frames = [asked(client, name, LARGE) for name in "abc"]
    broken = b"".join(frames)[:-4] + b"\x00\x00\xc0\x7f"
    with connect(client) as connection:
        connection.sendall(push(broken))
        assert reply(connection)[0] == 422
    wait_until(lambda: not list(db.scan_iter("*:incoming:*")))
    assert client.status().fresh_ready == 0
    assert client.push(frames) == {"g-a": "stored", "g-b": "stored", "g-c": "stored"}


def test_senders_that_stop_in_the_middle_hold_no_connection_to_redis(client: BufferClient, db: redis.Redis) -> None:
    frames = [asked(client, name, LARGE) for name in "ab"]
    body = push(frames[0] + frames[1])
    connections: list[socket.socket] = []
    numbers = []
    for _ in range(2):
        for _ in range(12):
            connections.append(connect(client))
            connections[-1].sendall(body[:-100_000])  # the first frame is in Redis, the second never comes
        wait_until(lambda: len(list(db.scan_iter("*:incoming:*"))) == len(connections))
        time.sleep(0.3)
        numbers.append(len(db.client_list()))
    assert numbers[1] - numbers[0] < 6  # those of the first twelve serve the second twelve
    assert client.push([asked(client, "c")]) == {"g-c": "stored"}
    for connection in connections:
        connection.close()
    wait_until(lambda: not list(db.scan_iter("*:incoming:*")))
    assert client.push(frames) == {"g-a": "stored", "g-b": "stored"}


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Intake[None]]]]:
    """What has read large bodies. The collector of circles is off: to it, a body of 60 MB is one object of many."""
    found: list[weakref.ref[Intake[None]]] = []
    begin = Intake.__init__

    def noting(self: Intake[None], *args: Any, **keywords: Any) -> None:
        begin(self, *args, **keywords)
        found.append(weakref.ref(self))

    monkeypatch.setattr(Intake, "__init__", noting)
    gc.disable()
    yield found
    gc.enable()


@pytest.mark.parametrize("query", ["", "?fresh=true"])
@pytest.mark.parametrize("is_cut_off", [False, True])
@pytest.mark.parametrize("is_broken", [False, True])
def test_the_memory_of_a_large_body_is_free_as_soon_as_it_is_refused(
    client: BufferClient, bodies: list[weakref.ref[Intake[None]]], query: str, is_cut_off: bool, is_broken: bool
) -> None:
    frames = [asked(client, name, LARGE) for name in "ab"]
    if is_broken:
        frames[0] = frames[0][:-4] + b"\x00\x00\xc0\x7f"
    whole = push(b"".join(frames), query=query)
    with connect(client) as connection:
        connection.sendall(whole[:-1000] if is_cut_off else whole)
        if is_cut_off:
            wait_until(lambda: len(bodies) == 1)
            connection.shutdown(socket.SHUT_WR)
        assert reply(connection)[0] == (411 if is_cut_off else 422 if is_broken else 200)
    wait_until(lambda: [body() for body in bodies] == [None], what="a body is held by nobody")


def test_an_answer_does_not_reach_the_connection_that_came_after(
    client: BufferClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that answers has the number of the sender's socket; the sender leaves, and its number is given away."""
    begun, duplicate = threading.Event(), os.dup

    def slow(descriptor: int) -> int:
        begun.set()
        time.sleep(0.5)
        return duplicate(descriptor)

    monkeypatch.setattr(shortcut, "finish_soon", lambda steps, patience_s: None)  # so that a thread answers
    frame = asked(client, "a")
    monkeypatch.setattr(os, "dup", slow)
    with connect(client) as connection:
        connection.sendall(push(frame))
        assert begun.wait(60)
    monkeypatch.setattr(os, "dup", duplicate)
    others = [connect(client) for _ in range(4)]
    assert not select.select(others, [], [], 1.0)[0]
    for other in others:
        other.close()
    assert client.status().fresh_ready == 1


def test_who_may_not_push_is_refused_here_too(db: redis.Redis, unix_redis: str) -> None:
    tokens = {role: f"token-of-the-{role.value}-0123" for role in Role}
    keyring = Keyring(",".join(f"{role}:{digest(token)}" for role, token in tokens.items()))
    with serving(new_store("redis", unix_redis, run="short"), small_config(), keyring) as client:
        owner = BufferClient(client.url, token=tokens[Role.OPERATOR])
        look(owner)
        frame = asked(owner, "a")
        found = {}
        for name, more in (
            ("nobody", ()),
            ("viewer", (f"Authorization: Bearer {tokens[Role.VIEWER]}",)),
            ("worker", (f"Authorization: Bearer {tokens[Role.WORKER]}",)),
        ):
            with connect(client) as connection:
                connection.sendall(push(frame, *more))
                found[name] = reply(connection)[0]
        assert found == {"nobody": 401, "viewer": 403, "worker": 200}


def test_its_time_is_measured_under_the_name_of_the_route(client: BufferClient, taken: list[int]) -> None:
    for name in "abc":
        client.push([asked(client, name)])
    assert len(taken) == 3
    with connect(client) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        text = reply(connection)[2].decode()
    assert 'bapo_buffer_operation_seconds_count{operation="push"} 3.0' in text
    assert 'bapo_buffer_ingested_groups_total{fate="stored"} 3.0' in text
