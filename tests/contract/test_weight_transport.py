"""Weights for hosts that share no folder: sent to the rollout server in pieces, fetched once per host, checked."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config
from bapo.core.errors import ConfigError, ContractError, UnavailableError, WeightMismatchError, WeightsAbsentError
from bapo.core.types import WeightUpdate
from bapo.runtime.file_digest import digest_of, root_of
from bapo.runtime.metrics.metric import Process
from bapo.runtime.metrics.server import Telemetry
from bapo.transport.rollout_client import RolloutClient, fetch_file, part_of, send_file
from bapo.transport.service_client import ServiceClient
from rollout_server.api import create_app
from rollout_server.weights.host_cache import WeightCache
from rollout_server.weights.receive import check_file
from rollout_server.weights.relay import WeightRelay
from tests.support.rollout import NO_TENSORS, Served, make_update

CONTENT = NO_TENSORS + bytes(range(254)) * 5  # 1,280 bytes: 13 pieces of 100
DIGEST = root_of([hashlib.sha256(CONTENT).digest()])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("bapo.transport.rollout_client", "rollout_server.weights.relay"):
        monkeypatch.setattr(f"{module}.PIECE_BYTES", 100)


class OtherHost:
    """A rollout server that cannot see the learner's folder; its workers cannot see its own either."""

    def __init__(self, folder: Path) -> None:
        self.updates: list[WeightUpdate] = []
        self.hidden: set[str] = set()
        self.store = WeightRelay(folder, lambda: self.served.url)
        fleet: Any = SimpleNamespace(update_weights=self._update)
        self.served = Served(create_app(fleet, Telemetry(Process.ROLLOUT_SERVER), store=self.store))

    def _update(self, update: WeightUpdate, *, rollback: bool) -> dict[str, float]:
        # The learner's path is of another host: here it names nothing.
        self.updates.append(self.store.locate(replace(update, path=f"/other-host{update.path}")))
        return {"worker-0": 0.1}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[OtherHost]:
    other = OtherHost(tmp_path / "server")
    yield other
    other.served.stop()


def peer(host: OtherHost) -> ServiceClient:
    return ServiceClient("the rollout server", host.served.url, timeout_s=10.0, retry_s=0.0)


def test_a_server_that_cannot_read_the_file_is_sent_it_and_its_workers_hosts_fetch_it(
    host: OtherHost, tmp_path: Path
) -> None:
    update = make_update(tmp_path / "learner", 3, content=CONTENT)
    assert RolloutClient(host.served.url).update_weights(update, timeout_s=30) == {"worker-0": 0.1}
    (given,) = host.updates
    assert Path(given.path).read_bytes() == CONTENT
    assert given.url == host.served.url
    cache = WeightCache(Config(rollout=RolloutConfig(weights_cache=str(tmp_path / "cache"))))
    here = cache.fetch(replace(given, path="/nowhere/version-3"))
    assert Path(here.path).read_bytes() == CONTENT
    assert Path(here.path).is_relative_to(tmp_path / "cache")


def test_a_worker_that_can_read_the_learners_file_makes_no_copy(tmp_path: Path) -> None:
    update = make_update(tmp_path / "learner", 3, content=CONTENT)
    cache = WeightCache(Config(rollout=RolloutConfig(weights_cache=str(tmp_path / "cache"))))
    assert cache.fetch(update) == update
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    with pytest.raises(WeightsAbsentError):
        cache.fetch(replace(update, path="/nowhere"))


def test_a_host_hashes_a_file_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[WeightUpdate] = []

    def counting(update: WeightUpdate) -> None:
        hashed.append(update)
        check_file(update)

    monkeypatch.setattr("rollout_server.weights.host_cache.check_file", counting)
    config = Config(rollout=RolloutConfig(weights_cache=str(tmp_path / "cache")))
    update = make_update(tmp_path / "learner", 3, content=CONTENT)
    threads = [threading.Thread(target=WeightCache(config).fetch, args=(update,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hashed == [update]
    Path(update.path).write_bytes(CONTENT[:-1] + b"x")
    for _ in range(2):
        with pytest.raises(WeightMismatchError):
            WeightCache(config).fetch(update)
    assert len(hashed) == 3


def test_a_user_without_a_name_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, whose user is a number."""

    def nobody(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr("pwd.getpwuid", nobody)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    WeightCache(Config())


def test_workers_of_one_host_fetch_once_and_the_two_newest_copies_stay(
    host: OtherHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def counting(server: ServiceClient, digest: str, num_bytes: int, target: Path) -> None:
        fetched.append(digest)
        fetch_file(server, digest, num_bytes, target)

    monkeypatch.setattr("rollout_server.weights.host_cache.fetch_file", counting)
    config = Config(rollout=RolloutConfig(weights_cache=str(tmp_path / "cache")))
    updates = [make_update(tmp_path / f"learner-{i}", i, content=CONTENT + bytes([i])) for i in range(3)]
    for update in updates:
        RolloutClient(host.served.url).update_weights(update, timeout_s=30)
        given = replace(host.updates[-1], path="/nowhere")
        caches = [WeightCache(config) for _ in range(4)]
        threads = [threading.Thread(target=cache.fetch, args=(given,)) for cache in caches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert fetched == [update.digest for update in updates]
    kept = {path.stem for path in (tmp_path / "cache").rglob("*.safetensors")}
    assert kept == {updates[1].digest, updates[2].digest}
    sent = {path.name for path in (tmp_path / "server").iterdir()}
    assert sent == {f"sent-{update.digest}.safetensors" for update in updates[1:]}


def test_a_transfer_that_broke_goes_on_where_it_was(host: OtherHost, tmp_path: Path) -> None:
    assert host.store.receive(DIGEST, 0, len(CONTENT), CONTENT[:100]) == 100
    assert host.store.receive(DIGEST, 300, len(CONTENT), CONTENT[300:400]) == 100, "a gap is not taken"
    assert host.store.receive(DIGEST, 0, len(CONTENT), CONTENT[:100]) == 100, "nothing is added twice"
    path = tmp_path / "weights"
    path.write_bytes(CONTENT)
    send_file(peer(host), path, DIGEST)
    assert host.store.read(DIGEST, 1200, 100) == CONTENT[1200:]


class Breaking:
    """A rollout server whose link breaks after so many pieces."""

    def __init__(self, server: ServiceClient, pieces: int) -> None:
        self._server = server
        self.pieces = pieces
        self.offsets: list[int] = []

    def call(self, method: str, path: str, **options: Any) -> Any:
        if len(self.offsets) == self.pieces:
            raise UnavailableError("the link broke")
        self.offsets.append(int(options["query"]["offset"]))
        return self._server.call(method, path, **options)


def test_a_fetch_that_broke_goes_on_where_it_was(host: OtherHost, tmp_path: Path) -> None:
    path, copy = tmp_path / "weights", tmp_path / "copy"
    path.write_bytes(CONTENT)
    send_file(peer(host), path, DIGEST)
    first, second = Breaking(peer(host), 4), Breaking(peer(host), 99)
    with pytest.raises(UnavailableError):
        fetch_file(first, DIGEST, len(CONTENT), copy)
    assert not copy.exists(), "what is not whole is not there"
    fetch_file(second, DIGEST, len(CONTENT), copy)
    assert copy.read_bytes() == CONTENT
    assert (first.offsets, second.offsets) == ([0, 100, 200, 300], [400, 500, 600, 700, 800, 900, 1000, 1100, 1200])
    assert [file.name for file in tmp_path.iterdir() if file.name.endswith(".part")] == []


@pytest.mark.parametrize("left", [b"x" * 150, CONTENT + b"x"], ids=["of another file", "too long"])
def test_a_part_that_is_damaged_costs_one_attempt_at_most(host: OtherHost, tmp_path: Path, left: bytes) -> None:
    path, copy = tmp_path / "weights", tmp_path / "copy"
    path.write_bytes(CONTENT)
    send_file(peer(host), path, DIGEST)
    part_of(copy).write_bytes(left)
    try:
        fetch_file(peer(host), DIGEST, len(CONTENT), copy)
    except WeightMismatchError:
        assert not part_of(copy).exists()
        fetch_file(peer(host), DIGEST, len(CONTENT), copy)
    assert copy.read_bytes() == CONTENT


def test_bytes_of_another_file_are_refused_on_both_sides(host: OtherHost, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(ContractError, match="digest"):
        send_file(peer(host), path, DIGEST)
    assert list((tmp_path / "server").iterdir()) == []
    send_file(peer(host), path, digest_of(path))
    sent = next((tmp_path / "server").iterdir())
    sent.rename(sent.with_name(f"sent-{DIGEST}.safetensors"))
    with pytest.raises(WeightMismatchError):
        fetch_file(peer(host), DIGEST, len(CONTENT), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("digest", ["..", "%2e%2e%2fetc", "ab" * 31])
def test_only_digests_name_files(host: OtherHost, digest: str) -> None:
    with pytest.raises(ContractError):
        host.store.receive(digest, 0, 1, b"x")
    with pytest.raises(ContractError):
        host.store.read(digest, 0, 1)


NO_WEIGHTS = {
    "a password": b"hunter2\n",
    "a list of tokens": b"learner 5e884898da28047151d0e56f8dc6292773603d0d\n" * 4,
    "nothing": b"",
    "a header that is longer than the file": (3).to_bytes(8, "little") + b"{}",
}


@pytest.mark.parametrize("content", NO_WEIGHTS.values(), ids=NO_WEIGHTS)
def test_a_file_of_this_host_that_holds_no_weights_is_served_to_nobody(tmp_path: Path, content: bytes) -> None:
    store = WeightRelay(tmp_path / "server", str)
    update = make_update(tmp_path / "secret", 3, content=content)
    with pytest.raises(WeightMismatchError):
        store.locate(update)
    with pytest.raises(WeightsAbsentError):
        store.read(update.digest, 0, 100)


def test_a_file_in_a_folder_that_may_not_be_entered_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another host the learner's path may name another user's folder."""
    update = make_update(tmp_path / "learner", 3, content=CONTENT)

    def refuse(self: Path, **_: Any) -> Any:
        if self == Path(update.path):
            raise PermissionError(13, "Permission denied", str(self))
        return given(self)

    given = Path.stat
    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(WeightsAbsentError):
        WeightRelay(tmp_path / "server", str).locate(update)


def test_a_piece_that_is_too_large_or_of_unknown_weights_is_refused(host: OtherHost) -> None:
    with pytest.raises(ContractError):
        host.store.read(DIGEST, 0, 101)
    with pytest.raises(WeightsAbsentError):
        peer(host).call("GET", f"/weights/files/{DIGEST}", query={"offset": "0", "length": "10"})


def test_copies_are_not_kept_in_a_folder_that_somebody_else_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    update = replace(make_update(tmp_path / "learner", 3, content=CONTENT), path="/nowhere", url="http://127.0.0.1:1")
    folder = tmp_path / f"bapo-weights-{os.getuid()}"
    others = tmp_path / "others"
    others.mkdir()
    folder.symlink_to(others)
    config = Config(rollout=RolloutConfig(sync_timeout_s=0.1))
    with pytest.raises(ConfigError, match=r"rollout\.weights_cache"):
        WeightCache(config).fetch(update)
    assert not list(others.iterdir())
    folder.unlink()
    folder.mkdir(mode=0o755)  # as an earlier version made it
    with pytest.raises(UnavailableError):
        WeightCache(config).fetch(update)
    assert folder.stat().st_mode & 0o777 == 0o700
