"""Servers that could not keep what the buffer promises are refused at the start: real ones."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from bapo.config.load import dump_toml
from bapo.errors import BapoError, ConfigError, UnavailableError
from bapo.records import RunDirectory
from bapo.types import Progress
from buffer_service.redis_kind import problem_of, refuse_unsuited
from buffer_service.redis_link import RedisLink
from tests.buffer_app import small_config
from tests.buffer_setup import PuttingRedisStore as RedisStore
from tests.integration.test_buffer_process import refused
from tests.patience import wait_until
from tests.redis_server import BINARY, RedisServer, free_port


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def server(ends: ExitStack, folder: Path, *options: str) -> RedisServer:
    folder.mkdir()
    started = RedisServer(folder, options=options).start()
    ends.callback(started.stop)
    return started


def sentinel(ends: ExitStack, folder: Path) -> str:
    folder.mkdir()
    port, conf = free_port(), folder / "sentinel.conf"
    conf.write_text(f"port {port}\nbind 127.0.0.1\ndir {folder}\n")
    process = subprocess.Popen([str(BINARY), str(conf), "--sentinel"], stdout=subprocess.DEVNULL)
    ends.callback(process.wait)
    ends.callback(process.kill)
    url = f"redis://127.0.0.1:{port}/0"
    wait_until(lambda: _answers(url))
    return url


def _answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url) as client:
            return bool(client.ping())
    except redis.ConnectionError:
        return False


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


def test_a_sentinel_is_refused(ends: ExitStack, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a Sentinel, which holds no data: name one primary"):
        refuse_unsuited(RedisLink(sentinel(ends, tmp_path / "sentinel")))


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


def test_a_password_that_changes_under_way_is_waited_for_and_a_wrong_one_at_the_start_is_not(
    ends: ExitStack, tmp_path: Path
) -> None:
    there = server(ends, tmp_path / "redis")
    link = RedisLink(there.url)
    link.load_scripts()
    store = RedisStore(link, "r", lease_s=30.0, max_attempts=3, in_step_order=True)
    with redis.Redis.from_url(there.url) as client:
        client.config_set("requirepass", "another")
        client.client_kill_filter(_type="normal", skipme=True)
        # As ConfigError it would end every worker and learner that calls, for good.
        with pytest.raises(UnavailableError, match="refuses the password that it has taken before"):
            store.report(Progress(step=1, policy_version=1))
        with pytest.raises(ConfigError, match="refuses the password of"):
            RedisLink(there.url).load_scripts()
        client.config_set("requirepass", "")
    store.report(Progress(step=1, policy_version=1))


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
        link.client.connection_pool.disconnect()
        store.report(Progress(step=2, policy_version=2))


def test_a_user_who_loses_rights_under_way_is_waited_for_and_one_who_has_none_at_the_start_is_not(
    ends: ExitStack, tmp_path: Path
) -> None:
    """As when an administrator resets the user, and then says what it may do."""
    there = server(ends, tmp_path / "redis")
    with redis.Redis.from_url(there.url) as client:
        client.execute_command("ACL", "SETUSER", "bapo", "on", ">pw", "~bapo:*", "+@all")
        link = RedisLink(there.url.replace("redis://", "redis://bapo:pw@"))
        link.load_scripts()
        store = RedisStore(link, "r", lease_s=30.0, max_attempts=3, in_step_order=True)
        client.execute_command("ACL", "SETUSER", "bapo", "resetkeys", "-@all")
        for call in (store.status, store.image, lambda: store.readiness(1), lambda: store.frames(["g"])):
            with pytest.raises(UnavailableError, match="does not allow the user of the buffer service what it needs"):
                call()
        with pytest.raises(BapoError, match="does not allow the user") as refused_at_the_start:
            RedisLink(there.url.replace("redis://", "redis://bapo:pw@")).load_scripts()
        assert type(refused_at_the_start.value) is BapoError
        client.execute_command("ACL", "SETUSER", "bapo", "~bapo:*", "+@all")
        assert store.status().step == 0


def test_a_server_that_has_become_a_node_of_a_cluster_is_waited_for(ends: ExitStack, tmp_path: Path) -> None:
    """What a name means may change under way: slots that are elsewhere are no error of whoever calls."""
    options = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no")
    nodes = [server(ends, tmp_path / name, *options, "--cluster-port", str(free_port())) for name in ("one", "two")]
    with redis.Redis.from_url(nodes[0].url) as one, redis.Redis.from_url(nodes[1].url) as two:
        two.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        port = nodes[1]._args[nodes[1]._args.index("--cluster-port") + 1]
        one.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[1].port, port)
        wait_until(lambda: len(one.execute_command("CLUSTER", "SLOTS")) == 1)
        wait_until(lambda: "cluster_state:ok" in str(one.execute_command("CLUSTER", "INFO")))
    store = RedisStore(RedisLink(nodes[0].url), "r", lease_s=30.0, max_attempts=3, in_step_order=True)
    for call in (store.status, store.image, lambda: store.readiness(1), lambda: store.frames(["g"])):
        with pytest.raises(UnavailableError, match="is a node of a Cluster now, and what we need is elsewhere"):
            call()


def test_a_server_that_evicts_is_refused(ends: ExitStack, tmp_path: Path) -> None:
    evicting = server(ends, tmp_path / "lru", "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match=r"deletes groups when it is full .maxmemory-policy allkeys-lru.: set"):
        refuse_unsuited(RedisLink(evicting.url))


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        ({"redis_version": "6.0.16"}, "is Redis 6.0.16; 6.2 or newer is needed, or Valkey"),
        ({"redis_version": "6.2.14", "redis_mode": "standalone", "role": "master"}, ""),
        ({"redis_version": "10.0.1"}, ""),
        ({"redis_version": "managed"}, ""),
        ({"maxmemory_policy": "volatile-lru"}, ""),  # only frames on their way in expire
        ({}, ""),
    ],
)
def test_only_what_is_said_counts(info: dict[str, str], problem: str) -> None:
    assert problem_of(info) == problem


def test_redis_itself_names_a_cluster_in_its_own_word() -> None:
    assert "is a node of a Redis Cluster" in problem_of({"redis_mode": "cluster"})
