"""Servers that could not keep what the buffer promises are refused at the start: real ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from bapo.config.load import dump_toml
from bapo.core.errors import ConfigError, UnavailableError
from bapo.core.types import Progress
from bapo.runtime.run_directory.layout import RunDirectory
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.redis.requirements import refuse_unsuited
from buffer_service.store.redis.store import RedisStore
from tests.process.test_buffer_process import refused
from tests.support.buffer_app import small_config
from tests.support.redis_server import RedisServer, free_port
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
    assert f"ConfigError: buffer.redis_url {node.url} is a node of a Redis Cluster, whose failover forgets" in message
    assert "name one primary that is no member of a Cluster" in message


def test_a_replica_is_refused_and_says_whose_it_is(ends: ExitStack, tmp_path: Path) -> None:
    primary = server(ends, tmp_path / "primary")
    replica = server(ends, tmp_path / "replica", "--replicaof", f"127.0.0.1 {primary.port}")
    with pytest.raises(ConfigError, match=f"is a replica of 127.0.0.1:{primary.port} and takes no writes"):
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
        with pytest.raises(UnavailableError, match="takes no writes now: You can't write against a read only replica"):
            store.report(Progress(step=2, policy_version=2))
        with pytest.raises(UnavailableError, match="has become a replica and takes no writes"):
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
        said = f"that it has taken before: set it there again, or write the new one to {secret}"
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
    with pytest.raises(ConfigError, match=r"deletes groups when it is full .maxmemory-policy allkeys-lru.: set"):
        refuse_unsuited(RedisLink(evicting.url))
