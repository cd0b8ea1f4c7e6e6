"""Real Redis servers: which are refused at the start, what connections do, what `bapo doctor` says of them."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from bapo.config.buffer import BufferConfig
from bapo.config.load import dump_toml
from bapo.config.tree import Config
from bapo.core.errors import ConfigError, UnavailableError
from bapo.core.types import Progress
from bapo.runtime.rank_environment import free_port
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.buffer_client import BufferClient
from buffer_service.store.redis.connection import ANSWER_TIMEOUT_S, CONNECT_TIMEOUT_S, RedisLink
from buffer_service.store.redis.durability import AofState
from buffer_service.store.redis.requirements import refuse_unsuited
from buffer_service.store.redis.store import RedisStore
from services.launcher.doctor.checks import redis_answer, redis_persistence
from tests.process.test_buffer_process import refused
from tests.support.buffer_app import small_config
from tests.support.redis_server import RedisServer
from tests.support.wait import wait_until


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def server(ends: ExitStack, folder: Path, *options: str) -> RedisServer:
    folder.mkdir()
    started = RedisServer(folder, options=options).start()
    ends.callback(started.stop)
    return started


def test_one_primary_that_evicts_nothing_is_accepted(redis_url: str) -> None:
    refuse_unsuited(RedisLink(redis_url))


def test_a_cluster_is_refused_by_the_service_with_one_clear_message(ends: ExitStack, tmp_path: Path) -> None:
    # A port for the cluster's own talk too: the default one, 10,000 above, may not exist.
    node = server(ends, tmp_path / "node", "--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    run = RunDirectory.create(tmp_path / "run", dump_toml(small_config(run={"name": "r"}, buffer={"port": 0})))
    code, message = refused(run, "--redis-url", node.url)
    assert code == 2
    assert f"ConfigError: buffer.redis_url {node.url} is a Redis Cluster node, whose failover may lose" in message
    assert "use a single primary that is not part of a Cluster" in message


def test_a_replica_is_refused_and_says_whose_it_is(ends: ExitStack, tmp_path: Path) -> None:
    primary = server(ends, tmp_path / "primary")
    replica = server(ends, tmp_path / "replica", "--replicaof", f"127.0.0.1 {primary.port}")
    with pytest.raises(ConfigError, match=f"127.0.0.1:{primary.port}"):
        refuse_unsuited(RedisLink(replica.url))


def test_a_primary_that_becomes_a_replica_is_away_until_one_takes_writes_again(ends: ExitStack, tmp_path: Path) -> None:
    first, other = server(ends, tmp_path / "first"), server(ends, tmp_path / "other")
    link = RedisLink(first.url)
    link.load_scripts()
    store = RedisStore(link, "r", lease_s=30.0, max_attempts=3, in_step_order=True)
    store.report(Progress(step=1, policy_version=1))
    with redis.Redis.from_url(first.url) as client:
        client.replicaof("127.0.0.1", other.port)
        wait_until(lambda: client.info("replication")["master_link_status"] == "up")
        with pytest.raises(UnavailableError, match="read only replica"):
            store.report(Progress(step=2, policy_version=2))
        with pytest.raises(UnavailableError, match="replica"):
            store.health()
        client.replicaof("NO", "ONE")
        store.report(Progress(step=2, policy_version=2))


def test_a_new_password_is_taken_from_its_file_without_a_new_start(ends: ExitStack, tmp_path: Path) -> None:
    there, secret = server(ends, tmp_path / "redis"), tmp_path / "password"
    with redis.Redis.from_url(there.url) as client:
        client.config_set("requirepass", "first")
        client.auth("first")
        secret.write_text("first\n")
        link = RedisLink(there.url.replace("redis://", "redis://:first@"), password_file=secret)
        link.load_scripts()
        store = RedisStore(link, "r", lease_s=30.0, max_attempts=3, in_step_order=True)
        client.config_set("requirepass", "second")
        client.client_kill_filter(_type="normal", skipme=True)
        said = f"that it accepted before: set it there again, or write the new one to {secret}"
        with pytest.raises(UnavailableError, match=re.escape(said)):
            store.report(Progress(step=1, policy_version=1))
        secret.write_text("second\n")
        store.report(Progress(step=1, policy_version=1))
        assert store.health().where == there.url, "and no password in it"
        secret.unlink()  # as it is replaced
        link._pool.disconnect()
        store.report(Progress(step=2, policy_version=2))


def test_a_server_that_evicts_is_refused(ends: ExitStack, tmp_path: Path) -> None:
    evicting = server(ends, tmp_path / "lru", "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match="maxmemory-policy"):
        refuse_unsuited(RedisLink(evicting.url))


# -- connections


def test_what_was_not_written_before_redis_was_started_again_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process has answered; the look behind it must not be answered by the second one, which has nothing
    unwritten."""
    server = RedisServer(tmp_path, aof=True).start()

    def restarted(first: AofState, look: Callable[[], AofState], where: str) -> None:
        server.kill()
        server.start()
        look()

    try:
        link = RedisLink(server.url)
        monkeypatch.setattr("buffer_service.store.redis.connection.until_written", restarted)
        with pytest.raises(UnavailableError, match="does not respond"):
            link.at_once(("SET", "a", "1"), written=True)
        monkeypatch.undo()
        assert link.at_once(("SET", "a", "1"), ("GET", "a"), written=True)[1] == b"1"
    finally:
        server.stop()


def test_callers_hear_that_redis_hangs_before_they_give_the_service_up() -> None:
    """A call that is given up first says that the buffer service does not answer, and where it would be started."""
    patience_s = inspect.signature(BufferClient).parameters["timeout_s"].default
    assert patience_s > CONNECT_TIMEOUT_S + ANSWER_TIMEOUT_S


def test_a_redis_that_takes_connections_and_says_nothing_is_given_up_as_soon_as_one_that_takes_none(
    tmp_path: Path,
) -> None:
    """The kernel goes on taking connections for a process that stands still."""
    server = RedisServer(tmp_path).start()
    try:
        link = RedisLink(server.url)
        with server.stopped():
            begun = time.monotonic()
            with pytest.raises(UnavailableError, match="Timeout"):
                link.at_once(("PING",))
            assert CONNECT_TIMEOUT_S <= time.monotonic() - begun < ANSWER_TIMEOUT_S / 2
        assert link.at_once(("PING",)) == [b"PONG"]
        with link.client.client() as one:
            one.ping()
            assert one.connection._sock.gettimeout() == ANSWER_TIMEOUT_S, "only the beginning is in a hurry"
    finally:
        server.stop()


# -- the doctor


def _config(url: str | None) -> Config:
    return Config(buffer=BufferConfig(redis_url=url))


@pytest.mark.parametrize(("aof", "status"), [(True, "ok"), (False, "warn")])
def test_a_redis_without_an_append_only_file_is_warned_of(tmp_path: Path, aof: bool, status: str) -> None:
    server = RedisServer(tmp_path, aof=aof).start()
    try:
        found = redis_persistence(_config(server.url))
    finally:
        server.stop()
    assert found is not None
    assert (found.status, "append-only file" in found.detail) == (status, True)


def test_a_password_is_shown_and_a_missing_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RedisServer(tmp_path, aof=True).start()
    try:
        with redis.Redis.from_url(server.url) as client:
            assert redis_answer(server.url) is None
            client.config_set("requirepass", "s3cret")
        assert redis_answer(server.url) is None, "a server that wants a password is a server"
        without = redis_persistence(_config(server.url))
        monkeypatch.setenv("BAPO_REDIS_PASSWORD", "s3cret")
        with_it = redis_persistence(_config(server.url))
    finally:
        server.stop()
    assert without is not None
    assert with_it is not None
    assert (without.status, "requires a password" in without.detail) == ("warn", True)
    assert with_it.status == "ok"


def test_nothing_is_asked_where_there_is_nobody_to_ask() -> None:
    assert redis_persistence(_config(None)) is None


def test_a_redis_that_is_away_is_a_warning(tmp_path: Path) -> None:
    found = redis_persistence(_config(f"unix://{tmp_path}/no.sock"))
    assert found is not None
    assert found.status == "warn"
