"""Who may do what in Redis itself, and which way frames take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import redis
import urllib3

from bapo.core.codec import pack_group
from bapo.core.errors import ConfigError
from bapo.runtime.auth.api_tokens import Keyring, Role, digest
from bapo.runtime.auth.redis_password import USERS
from bapo.transport.buffer_client import BufferClient
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.redis.frame_access import FrameAccess
from buffer_service.store.redis.keys import FORMAT, Keys
from buffer_service.store.redis.requirements import refuse_other_format
from buffer_service.store.redis.store import RedisStore
from tests.support.buffer import answer, new_store, stored
from tests.support.buffer_app import serving, small_config
from tests.support.factories import make_request

TOKENS = {role: f"token-of-the-{role.value}-0123456789" for role in Role}
NAME = "f" * 32
KEYS = Keys("test")


@pytest.fixture
def client(redis_url: str) -> Iterator[BufferClient]:
    with serving(new_store(redis_url), small_config()) as client:
        yield client


def access(url: str, role: Role | None = None) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {TOKENS[role]}"} if role else {}
    found: dict[str, Any] = urllib3.request("GET", f"{url}/frame-access", headers=headers, retries=False).json()
    return found


def as_user(redis_url: str, login: dict[str, str]) -> Any:
    return redis.Redis.from_url(redis_url, username=login["user"], password=login["password"])


def refused(call: Any) -> bool:
    try:
        call()
    except redis.exceptions.NoPermissionError:
        return True
    return False


def test_a_worker_writes_frames_that_expire_and_nothing_else(client: BufferClient, redis_url: str) -> None:
    login = access(client.url)["write"]
    worker, key = as_user(redis_url, login), KEYS.incoming(NAME)
    assert worker.psetex(key, 1000, b"frame")
    for call in (
        lambda: worker.set(key, b"for ever"),
        lambda: worker.get(key),
        lambda: worker.persist(key),
        lambda: worker.delete(key),
        lambda: worker.psetex(KEYS.group("g-a"), 1000, b"another frame"),
        lambda: worker.psetex(KEYS["meta"], 1000, b""),
        lambda: worker.keys("*"),
        lambda: worker.eval("return 1", 0),
        lambda: worker.flushall(),
    ):
        assert refused(call)


def test_a_learner_reads_stored_frames_and_nothing_else(redis_url: str) -> None:
    store = new_store(redis_url)
    stored(store, "a")
    with serving(store, small_config()) as client:
        learner = as_user(redis_url, access(client.url)["read"])
        assert learner.mget(KEYS.group("g-a"), KEYS.group("none")) == [store.frames(["g-a"])[0], None]
        for call in (
            lambda: learner.mget(KEYS.incoming(NAME)),
            lambda: learner.mget(KEYS.access),
            lambda: learner.mget(Keys("other").group("g-a")),
            lambda: learner.psetex(KEYS.group("g-a"), 1000, b""),
            lambda: learner.hgetall(KEYS["records"]),
        ):
            assert refused(call)


def test_each_role_is_told_of_its_own_user(redis_url: str) -> None:
    keyring = Keyring(",".join(f"{role}:{digest(token)}" for role, token in TOKENS.items()))
    with serving(new_store(redis_url), small_config(), keyring) as client:
        told = {role: access(client.url, role) for role in (Role.WORKER, Role.LEARNER, Role.OPERATOR)}
    assert [bool(told[role]["write"]) for role in told] == [True, False, True]
    assert [bool(told[role]["read"]) for role in told] == [False, True, True]


@pytest.mark.parametrize("way", ["direct", "http", "by the service's setting", "old Redis", "unreachable"])
def test_whichever_way_frames_take_the_batch_is_the_same(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    store, config = new_store(redis_url), small_config(buffer={"direct": way != "by the service's setting"})
    if way == "old Redis":  # before version 7
        monkeypatch.setattr("buffer_service.store.redis.frame_access.WRITE", "%X")
        monkeypatch.setattr("buffer_service.store.redis.frame_access.READ", "%X")
    if way == "unreachable":
        assert isinstance(store, RedisStore)
        store._link.where = "unix:///nowhere/redis.sock"
    with serving(store, config) as served, redis.Redis.from_url(redis_url) as raw:
        client = BufferClient(served.url, direct="off" if way == "http" else "auto")
        requests = [make_request(prompt_id=name) for name in "abcd"]
        client.enqueue(requests)
        frames = [pack_group(answer(request, "11000000")) for request in requests]
        raw.config_resetstat()
        assert set(client.push(frames).values()) == {"stored"}
        batch = client.batch(1, timeout_s=60)
        users = {line["user"] for line in raw.client_list()}
    assert [pack_group(entry.group) for entry in batch.entries] == frames
    assert ("bapo-test-read" in users) is (way == "direct")


def test_frames_go_by_http_while_redis_has_forgotten_its_users(client: BufferClient, redis_url: str) -> None:
    """As after a restart: they are made again when somebody asks."""
    requests = [make_request(prompt_id=name) for name in "ab"]
    client.enqueue(requests)
    assert client.push([pack_group(answer(requests[0]))]) == {"g-a": "stored"}
    with redis.Redis.from_url(redis_url) as raw:
        raw.acl_deluser("bapo-test-write", "bapo-test-read")
    assert client.push([pack_group(answer(requests[1]))]) == {"g-b": "stored"}
    client._frames._ask_at = 0.0
    assert client._frames._user("write") is not None


def test_a_run_of_another_format_is_refused_by_name(redis_url: str) -> None:
    link = RedisLink(redis_url)
    store = new_store(redis_url)
    refuse_other_format(link, KEYS)
    stored(store, "a")
    refuse_other_format(link, KEYS)
    with redis.Redis.from_url(redis_url) as raw:
        raw.hset(KEYS["meta"], "format", "1")
        with pytest.raises(ConfigError, match=f"format 1, .* format {FORMAT}"):
            refuse_other_format(link, KEYS)
        with pytest.raises(ConfigError, match="format 1"):
            store.status()
        raw.hdel(KEYS["meta"], "format")  # as versions wrote it that had no number
        with pytest.raises(ConfigError, match="format 1"):
            refuse_other_format(link, KEYS)


def test_the_only_user_of_a_shared_redis_may_make_the_two_users(redis_url: str) -> None:
    """docker-compose.yml and deploy/k8s give the buffer service this user and no other."""
    (rules,) = (line.split()[2:] for line in USERS.format(user="bapo", digest=digest("pw")).splitlines()[1:])
    with redis.Redis.from_url(redis_url) as admin:
        admin.execute_command("ACL", "SETUSER", "bapo", "reset", *rules)
        url = redis_url.replace("redis://", "redis://bapo:pw@")
        try:
            login = FrameAccess(RedisLink(url), KEYS, "test").writer()
            assert login is not None
            assert as_user(redis_url, asdict(login)).psetex(KEYS.incoming(NAME), 1000, b"frame")
        finally:
            admin.execute_command("ACL", "DELUSER", "bapo", "bapo-test-write")
