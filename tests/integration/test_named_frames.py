"""A learner beside Redis reads the frames of its batches there, and nothing else; whatever fails, it gets its batch."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from bapo.clients import BufferClient
from bapo.connection import Pool
from bapo.named_frames import MEDIA_TYPE, FrameReader, NamedFrames, NotReadableError, pack_named, unpack_named
from bapo.wire import pack_group, unpack_batch
from buffer_service.redis_link import RedisLink
from buffer_service.redis_store import RedisStore
from tests.buffer_app import serving, small_config
from tests.buffer_setup import answer, new_store
from tests.factories import make_request
from tests.patience import PATIENCE_S
from tests.redis_server import RedisServer

NAMES = ("a", "b", "c", "d")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis with a unix socket, as the launcher starts it."""
    server = RedisServer(tmp_path, aof=True, options=("--unixsocket", str(tmp_path / "s"), "--unixsocketperm", "700"))
    yield server.start()
    server.stop()


@pytest.fixture
def client(server: RedisServer) -> Iterator[BufferClient]:
    """Of a service whose step 1 is complete."""
    with serving(new_store("redis", f"unix://{server.folder / 's'}"), small_config()) as client:
        fill(client)
        yield client


@pytest.fixture
def straight(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Batches that were read from Redis itself."""
    found: list[bytes] = []
    read = FrameReader.batch_frame

    def recorded(reader: FrameReader, names: NamedFrames) -> memoryview:
        frame = read(reader, names)
        found.append(bytes(frame))
        return frame

    monkeypatch.setattr(FrameReader, "batch_frame", recorded)
    return found


def fill(client: BufferClient) -> None:
    requests = [make_request(prompt_id=name) for name in NAMES]
    client.enqueue(requests)
    fates = client.push([pack_group(answer(request)) for request in requests])
    assert set(fates.values()) == {"stored"}


def inline(client: BufferClient, step: int = 1) -> bytes:
    """The batch as the service sends it."""
    return bytes(BufferClient(client.url, direct="off").batch_frame(step, timeout_s=PATIENCE_S))


def named(client: BufferClient) -> NamedFrames:
    """What the service answers to who asks for names."""
    pool = Pool(client.url, connect_timeout_s=PATIENCE_S, most_idle=1)
    reply = pool.request("POST", "/batches/1?frames=named", {}, (), timeout_s=PATIENCE_S)
    assert reply.headers["content-type"] == MEDIA_TYPE, reply.body
    return unpack_named(reply.body)


def test_the_frame_read_from_redis_is_the_one_that_the_service_sends(
    client: BufferClient, straight: list[bytes]
) -> None:
    frame = client.batch_frame(1, timeout_s=PATIENCE_S)
    assert bytes(frame) == inline(client)
    assert straight == [bytes(frame)]
    assert [entry.group.group_id for entry in unpack_batch(frame).entries] == ["g-a", "g-b", "g-c", "g-d"]


def test_a_wait_says_its_reason_and_ends_with_the_named_batch(client: BufferClient, straight: list[bytes]) -> None:
    client.batch(1, timeout_s=PATIENCE_S)
    client.commit(1, checkpointed=0)
    reasons: list[str] = []

    def on_wait(reason: str) -> None:
        reasons.append(reason)
        if len(reasons) == 1:
            requests = [make_request(prompt_id=f"later-{i}", step=2) for i in range(4)]
            client.enqueue(requests)
            client.push([pack_group(answer(request)) for request in requests])

    frame = client.batch_frame(2, timeout_s=PATIENCE_S, on_wait=on_wait)
    assert reasons[0].startswith("0/4 fresh groups")
    assert straight[-1] == bytes(frame)


def test_the_user_of_the_learner_may_read_frames_of_its_run_and_nothing_else(
    server: RedisServer, client: BufferClient
) -> None:
    found = named(client)
    assert found.keys == tuple(f"bapo:{{test}}:group:g-{name}" for name in NAMES)
    with closing(redis.Redis(port=server.port)) as owner:
        owner.set("bapo:{other}:group:g-a", b"of another run")
        assert owner.exists("bapo:{test}:tables")
    with closing(redis.Redis(port=server.port, username=found.user, password=found.password)) as reader:
        assert all(reader.mget(list(found.keys)))
        for command in (
            ("MGET", "bapo:{test}:tables"),
            ("MGET", found.keys[0], "bapo:{test}:meta"),
            ("MGET", "bapo:{other}:group:g-a"),
            ("MGET", "bapo:{test}:incoming:1"),
            ("GET", found.keys[0]),
            ("SET", found.keys[0], "x"),
            ("SET", "bapo:{test}:group:new", "x"),
            ("UNLINK", found.keys[0]),
            ("RENAME", found.keys[0], "x"),
            ("KEYS", "*"),
            ("SCAN", "0"),
            ("EVAL", "return 1", "0"),
            ("FLUSHALL",),
            ("CONFIG", "GET", "*"),
            ("ACL", "LIST"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                reader.execute_command(*command)


KILLED = """
import sys
from tests.buffer_setup import new_store
print(new_store("redis", sys.argv[1]).named_frames(b"", ["g"], 1).user, flush=True)
sys.stdin.read()
"""


def test_the_user_of_a_killed_service_is_removed_by_the_next_one_and_that_of_a_living_one_is_not(
    server: RedisServer,
) -> None:
    url = f"unix://{server.folder / 's'}"
    stores = [new_store("redis", url), new_store("redis", url, run="test-2"), new_store("redis", url)]
    living, other = (store.named_frames(b"", ["g"], 1) for store in stores[:2])
    assert living is not None
    assert other is not None
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    killed = process.stdout.readline().strip()
    with closing(redis.Redis(port=server.port)) as owner:
        owner.execute_command("ACL", "SETUSER", "bapo-reader-test-12345678")  # a service of an earlier version
        before = set(owner.acl_users())
        process.kill()
        process.communicate()
        next_one = stores[2].named_frames(b"", ["g"], 1)
        assert next_one is not None
        assert before >= {killed, living.user, other.user}
        assert set(owner.acl_users()) == before - {killed} | {next_one.user}
    with closing(redis.Redis(port=server.port, username=living.user, password=living.password)) as reader:
        assert reader.mget(["bapo:{test}:group:g"]) == [None]


def test_a_wrong_password_opens_nothing(client: BufferClient) -> None:
    found = named(client)
    wrong = unpack_named(pack_named(found).replace(found.password.encode(), b"0" * 64))
    with pytest.raises(NotReadableError, match="does not let us in"):
        FrameReader(PATIENCE_S).batch_frame(wrong)


def test_a_learner_that_cannot_open_the_socket_gets_its_batch_from_the_service(
    server: RedisServer, client: BufferClient, straight: list[bytes]
) -> None:
    (server.folder / "s").rename(server.folder / "elsewhere")  # the service is connected already
    frame = client.batch_frame(1, timeout_s=PATIENCE_S)
    assert bytes(frame) == inline(client)
    assert straight == []


def test_a_redis_that_was_started_again_is_read_again(server: RedisServer, client: BufferClient) -> None:
    before = bytes(client.batch_frame(1, timeout_s=PATIENCE_S))
    server.kill()
    server.start()  # it has forgotten the user, and every connection
    assert bytes(client.batch_frame(1, timeout_s=PATIENCE_S)) == before
    again = BufferClient(client.url, timeout_s=PATIENCE_S)
    assert bytes(again.batch_frame(1, timeout_s=PATIENCE_S)) == before


def test_a_frame_that_is_gone_is_the_services_business(server: RedisServer, client: BufferClient) -> None:
    found = named(client)
    with closing(redis.Redis(port=server.port)) as owner:
        owner.delete(found.keys[2])
    with pytest.raises(NotReadableError, match="gone"):
        FrameReader(PATIENCE_S).batch_frame(found)


def test_nothing_is_named_where_a_learner_could_not_or_should_not_read(
    server: RedisServer, straight: list[bytes]
) -> None:
    config = small_config()
    off = small_config(buffer={"direct": False})
    socket_url = f"unix://{server.folder / 's'}"
    for run, url, settings in (("tcp", server.url, config), ("off", socket_url, off)):
        with serving(new_store("redis", url, run=run), settings) as client:
            fill(client)
            assert len(client.batch(1, timeout_s=PATIENCE_S).entries) == 4
    with serving(new_store("memory", ""), config) as client:
        fill(client)
        assert len(client.batch(1, timeout_s=PATIENCE_S).entries) == 4
    assert straight == []


def test_a_service_that_may_not_make_users_sends_its_batches_itself(server: RedisServer, straight: list[bytes]) -> None:
    with closing(redis.Redis(port=server.port)) as owner:
        owner.execute_command("ACL", "SETUSER", "bapo", "on", ">secret", "~*", "&*", "+@all", "-acl")
    link = RedisLink(f"unix://bapo:secret@{server.folder / 's'}")
    store = RedisStore(link, "test", lease_s=60.0, max_attempts=3)
    with serving(store, small_config()) as client:
        fill(client)
        assert len(client.batch(1, timeout_s=PATIENCE_S).entries) == 4
    assert straight == []


FRAMES = NamedFrames(path="", user="u", password="p", start=b"start", keys=("k1", "k2"), num_bytes=6)


@contextmanager
def scripted(folder: Path, reply: bytes) -> Iterator[NamedFrames]:
    """A server that lets everybody in, answers whatever is asked next with `reply` and hangs up."""
    path = str(folder / "scripted")
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with closing(connection):
                connection.recv(1 << 16)
                connection.sendall(b"+OK\r\n")
                connection.recv(1 << 16)
                connection.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield replace(FRAMES, path=path)
        thread.join(PATIENCE_S)


def test_frames_follow_each_other_behind_the_start(tmp_path: Path) -> None:
    with scripted(tmp_path, b"*2\r\n$4\r\nabcd\r\n$2\r\nef\r\n") as found:
        assert bytes(FrameReader(PATIENCE_S).batch_frame(found)) == b"startabcdef"


@pytest.mark.parametrize(
    ("reply", "what"),
    [
        (b"*2\r\n$4\r\nabcd\r\n$-1\r\n", "gone"),
        (b"*2\r\n$4\r\nabcd\r\n$3\r\nefg\r\n", "gone"),  # longer than what was named
        (b"*2\r\n$4\r\nabcd\r\n$1\r\ne\r\n", "5 bytes instead of 6"),
        (b"*2\r\n$4\r\nabcdX\r\n$1\r\ne\r\n", "does not end"),
        (b"*1\r\n$6\r\nabcdef\r\n", "answered MGET"),
        (b"-NOPERM no permissions to access a key\r\n", "NOPERM"),
        (b"-" + b"x" * 100, "says"),
        (b"*2\r\n$4\r\nabcd\r\n$2\r\ne", "has gone"),
        (b"*2\r\n$4\r\nab", "has gone"),
        (b"", "has gone"),
    ],
)
def test_what_is_no_answer_is_not_taken_for_frames(tmp_path: Path, reply: bytes, what: str) -> None:
    with scripted(tmp_path, reply) as found, pytest.raises(NotReadableError, match=what):
        FrameReader(PATIENCE_S).batch_frame(found)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x90", b"\x81\xa1x\x01"])
def test_an_answer_that_names_nothing_is_not_readable(data: bytes) -> None:
    with pytest.raises(NotReadableError, match="names no frames"):
        unpack_named(data)
