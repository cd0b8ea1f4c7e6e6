"""The users that `bapo tokens create --redis` makes, in a real server: who gets in, and what survives a SIGKILL."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bapo.runtime.auth.redis_password import USER, RedisSecrets
from bapo.runtime.rank_environment import free_port
from services.launcher.embedded_redis import server_binary
from tests.support.wait import wait_until

IMPATIENT = Retry(NoBackoff(), 0)
SERVERS = {"embedded": server_binary(), "redis-server": shutil.which("redis-server")}
"""The embedded one is mended: it no longer asks for rights when it replays its file. Redis 7 still does."""


@pytest.fixture(params=sorted(SERVERS))
def binary(request: pytest.FixtureRequest) -> str:
    found = SERVERS[request.param]
    return found or pytest.skip("no redis-server on PATH (Debian: apt-get install redis-server)")


@pytest.fixture
def made(tmp_path: Path) -> RedisSecrets:
    made = RedisSecrets(tmp_path / "secrets")
    made.create()
    return made


@contextmanager
def server(binary: str, folder: Path, made: RedisSecrets) -> Iterator[int]:
    """One with these users on a port of the loopback, as in compose; killed behind the block."""
    port = free_port()
    command = [
        binary, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", "",
        "--appendonly", "yes", "--aclfile", str(made.users_path),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=(folder / "log").open("a"), stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: process.poll() is not None or answers(port), what="the server answers")
        assert process.poll() is None, (folder / "log").read_text()
        yield port
    finally:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    """Whether somebody listens and has loaded its file."""
    try:
        redis.Redis(port=port, retry=IMPATIENT).ping()
    except redis.AuthenticationError:
        return True
    except redis.ConnectionError:
        return False
    return True


def user_of(port: int, made: RedisSecrets) -> redis.Redis:
    """A connection of the buffer service."""
    return redis.Redis(port=port, retry=IMPATIENT, username=USER, password=made.password_path.read_text().strip())


def test_a_transaction_that_was_acknowledged_survives_a_kill(binary: str, tmp_path: Path, made: RedisSecrets) -> None:
    with server(binary, tmp_path, made) as port:
        transaction = user_of(port, made).pipeline(transaction=True)
        transaction.set("bapo:{r}:a", "1").set("bapo:{r}:b", "2").execute()
    with server(binary, tmp_path, made) as port:
        assert user_of(port, made).mget("bapo:{r}:a", "bapo:{r}:b") == [b"1", b"2"]
    assert "CRITICAL" not in (tmp_path / "log").read_text()


def test_the_user_may_touch_the_keys_of_runs_and_run_no_administrative_command(
    binary: str, tmp_path: Path, made: RedisSecrets
) -> None:
    with server(binary, tmp_path, made) as port:
        client = user_of(port, made)
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.set("other", "1")
        for words in (("CONFIG", "SET", "dir", "/"), ("ACL", "LIST"), ("FLUSHALL",), ("SHUTDOWN",), ("KEYS", "*")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*words)
