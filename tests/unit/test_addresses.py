"""IPv4, IPv6 and names wherever an address is written or read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bapo.config.tree import Config
from bapo.core.addresses import authority, bare_host, http_address, http_url, is_loopback, is_wildcard, reachable
from bapo.core.errors import ConfigError
from bapo.runtime.auth.api_tokens import listen_host
from bapo.runtime.auth.redis_password import problem_of_url, refuse_open, with_password, without_password
from bapo.runtime.metrics.metric import Process
from bapo.runtime.rank_environment import nodes_of
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.buffer_client import BufferClient
from bapo.transport.endpoints import buffer_url, dashboard_url, rollout_url
from rollout_server.__main__ import reached_at
from services.launcher.targets import FILE, TargetFile

HOSTS = {
    "127.0.0.1": "127.0.0.1",
    "localhost": "localhost",
    "node-1.cluster": "node-1.cluster",
    "::1": "[::1]",
    "[::1]": "[::1]",
    "::ffff:127.0.0.1": "[::ffff:127.0.0.1]",
    "2001:db8::7": "[2001:db8::7]",
    "fe80::1%eth0": "[fe80::1%25eth0]",
    "[fe80::1%25eth0]": "[fe80::1%25eth0]",
}
"""As it is given -> as it stands in a URL."""


@pytest.mark.parametrize("given", HOSTS)
def test_a_host_is_written_in_a_url_and_read_again(given: str) -> None:
    assert authority(given, 8700) == f"{HOSTS[given]}:8700"
    assert http_url(bare_host(given), 8700) == f"http://{HOSTS[given]}:8700"
    assert bare_host(HOSTS[given]) == bare_host(given)
    assert "[" not in bare_host(given)


@pytest.mark.parametrize(
    "given", ["", "127.0.0.1:8700", "[::1]:8700", "http://::1", "[::1", "::1]", "[host]", "a b", ":::1", "[127.0.0.1]"]
)
@pytest.mark.parametrize("section", ["buffer", "rollout", "dashboard"])
def test_what_is_no_host_is_refused_before_anything_starts(
    given: str, section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="host"):
        Config.model_validate({section: {"host": given}})
    if given:
        monkeypatch.setenv("BAPO_HOST", given)
        with pytest.raises(ConfigError):
            listen_host(None, "127.0.0.1")


@pytest.mark.parametrize("given", ["::1", "[::1]"])
def test_services_are_called_where_they_listen(given: str, tmp_path: Path) -> None:
    sections = {name: {"host": given} for name in ("buffer", "rollout", "dashboard")}
    config, run = Config.model_validate(sections), RunDirectory(tmp_path)
    assert buffer_url(config, run) == "http://[::1]:8700"
    assert rollout_url(config, run) == "http://[::1]:8710"
    assert dashboard_url(config, run) == "http://[::1]:8704/"


@pytest.mark.parametrize(
    ("listens", "called"),
    [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("::ffff:0.0.0.0", "::1"), ("::2", "::2"), ("localhost", "localhost")],
)
def test_a_wildcard_is_called_on_the_loopback_of_its_family(listens: str, called: str) -> None:
    assert reachable(listens) == called
    assert is_wildcard(listens) == (listens != called)


@pytest.mark.parametrize(
    ("host", "want"),
    [("127.0.0.9", True), ("::1", True), ("[::1]", True), ("::ffff:127.0.0.1", True), ("::1%lo", True),
     ("localhost", True),
     ("::", False), ("0.0.0.0", False), ("::ffff:10.0.0.1", False), ("fe80::1%lo", False), ("example", False)],
)  # fmt: skip
def test_only_the_loopback_needs_no_tokens(host: str, want: bool) -> None:
    assert is_loopback(host) is want


@pytest.mark.parametrize("text", ["agents.example.org", "ftp://a", "https://", "http://a/?b=1", "http://a#b"])
def test_an_address_for_others_is_a_url(text: str) -> None:
    with pytest.raises(ValueError, match="not an address"):
        http_address(text)
    assert http_address("https://agents.example.org/bapo/") == "https://agents.example.org/bapo"


def test_workers_on_other_hosts_are_told_an_address_that_they_reach() -> None:
    assert reached_at("http://[::]:8710", "2001:db8::7") == "http://[2001:db8::7]:8710"
    assert reached_at("http://0.0.0.0:8710", "10.0.0.7") == "http://10.0.0.7:8710"
    assert reached_at("http://[::1]:8710", "2001:db8::7") == "http://[::1]:8710"
    # The URL of the buffer service is one for callers on this host, also where it listens on every address.
    assert reached_at("http://127.0.0.1:8700", "10.0.0.7", "0.0.0.0") == "http://10.0.0.7:8700"
    assert reached_at("http://10.0.0.1:8700", "10.0.0.7", "10.0.0.1") == "http://10.0.0.1:8700"


def test_prometheus_is_given_brackets(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_port(Process.BUFFER_SERVICE.value, 8700)
    TargetFile(run, "r", dict.fromkeys(Process, "::1")).write([Process.BUFFER_SERVICE.value])
    assert [entry["targets"] for entry in json.loads((tmp_path / FILE).read_text())] == [["[::1]:8700"]]


def test_the_host_of_a_redis_keeps_its_brackets_beside_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAPO_REDIS_PASSWORD", "p:w")
    assert with_password("redis://bapo@[::1]:6379/0") == "redis://bapo:p%3Aw@[::1]:6379/0"
    assert without_password("redis://bapo:p%3Aw@[::1]:6379/0") == ("redis://bapo@[::1]:6379/0", "p:w")
    assert problem_of_url("redis://[::1]:6379/0") == problem_of_url("redis://[fe80::1%25eth0]:6379") == ""
    assert "brackets" in problem_of_url("redis://::1:6379/0")
    refuse_open("redis://[::1]:6379", allowed=False)
    refuse_open("redis://[::ffff:127.0.0.1]:6379", allowed=False)
    with pytest.raises(ConfigError):
        refuse_open("redis://[2001:db8::7]:6379", allowed=False)


def test_a_client_takes_brackets_and_says_that_they_are_missing() -> None:
    assert BufferClient("http://[::1]:8700").url == "http://[::1]:8700"
    assert BufferClient("http://[fe80::1%25eth0]:8700,http://10.0.0.1:8700").url.startswith(
        "http://[fe80::1%25eth0]:8700"
    )
    with pytest.raises(ConfigError, match="brackets"):
        BufferClient("http://::1:8700")


@pytest.mark.parametrize("address", ["2001:db8::7", "[2001:db8::7]"])
def test_ranks_on_several_hosts_meet_at_an_address_without_brackets(address: str) -> None:
    found = nodes_of({"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": address})
    assert (found.address, found.port) == ("2001:db8::7", 29500)
