"""Rollout servers side by side: workers of different names, one note of the newest weights, and who may be behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bapo.config.tree import Config
from bapo.core.errors import BapoError, UnavailableError
from bapo.core.types import Progress
from bapo.runtime.metrics.server import Telemetry
from rollout_server.fleet.fleet import Fleet
from rollout_server.weights.newest import Follower, remember
from tests.support.fake_worker import FakeHandle
from tests.support.rollout import make_update
from tests.support.wait import wait_until


class Buffer:
    """Says how far the learner is."""

    def __init__(self) -> None:
        self.policy_version = 0
        self.is_up = True
        self.asked = 0

    def progress(self) -> Progress:
        self.asked += 1
        if not self.is_up:
            raise UnavailableError("away")
        return Progress(step=self.policy_version, policy_version=self.policy_version)


class Host:
    """A rollout server of the run, without its API and its threads."""

    def __init__(self, name: str, weights: Path, buffer: Buffer, fatal: list[BapoError]) -> None:
        self.handles: list[FakeHandle] = []
        self.fleet = Fleet(
            Config(),
            make_handle=self._make,
            release=lambda _: None,
            telemetry=Telemetry(),
            on_fatal=fatal.append,
            remember=lambda update: remember(weights, update),
            prefix=f"{name}-",
        )
        self.follower = Follower(weights, buffer, self.fleet.follow)
        self.fleet.scale(1)
        wait_until(lambda: [status.state for status in self.fleet.statuses()] == ["ready"])

    @property
    def version(self) -> int:
        return self.handles[-1].version

    def _make(self, worker_id: str) -> FakeHandle:
        self.handles.append(FakeHandle(worker_id))
        return self.handles[-1]


MakeHost = Callable[[str], Host]


@pytest.fixture
def buffer() -> Buffer:
    return Buffer()


@pytest.fixture
def make_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, buffer: Buffer) -> Iterator[MakeHost]:
    monkeypatch.setattr("rollout_server.fleet.fleet.POLL_S", 0.01)
    monkeypatch.setattr("rollout_server.fleet.fleet.WATCH_S", 0.01)
    hosts: list[Host] = []
    fatal: list[BapoError] = []

    def make(name: str) -> Host:
        hosts.append(Host(name, tmp_path, buffer, fatal))
        return hosts[-1]

    yield make
    for host in hosts:
        host.fleet.stop()
    assert fatal == []


def test_workers_of_two_hosts_have_different_names(make_host: MakeHost) -> None:
    one, other = make_host("one"), make_host("other")
    assert [handle.worker_id for handle in one.handles + other.handles] == ["one-worker-0", "other-worker-0"]
    assert one.fleet.statuses()[0].worker_id == "one-worker-0"


def test_the_others_follow_the_one_that_the_learner_told(make_host: MakeHost, buffer: Buffer, tmp_path: Path) -> None:
    one, other = make_host("one"), make_host("other")
    one.fleet.update_weights(make_update(tmp_path / "w", 3))
    buffer.policy_version = 3
    other.follower.look()
    assert (one.version, other.version) == (3, 3)
    assert other.handles[0].events == ["start", "begin None", "update 3"]


def test_a_note_of_an_earlier_attempt_at_the_run_is_not_followed(
    make_host: MakeHost, buffer: Buffer, tmp_path: Path
) -> None:
    remember(tmp_path, make_update(tmp_path / "w", 9))
    host = make_host("one")
    host.follower.look()
    assert host.version == 1
    assert host.fleet.newest is None


def test_a_learner_that_went_back_takes_all_of_them_back(make_host: MakeHost, buffer: Buffer, tmp_path: Path) -> None:
    one, other = make_host("one"), make_host("other")
    buffer.policy_version = 8
    one.fleet.update_weights(make_update(tmp_path / "w8", 8))
    other.follower.look()
    one.fleet.update_weights(make_update(tmp_path / "w4", 4), rollback=True)
    other.follower.look()
    assert (one.version, other.version) == (4, 4)


def test_an_update_of_its_own_is_never_undone_by_an_older_note(
    make_host: MakeHost, buffer: Buffer, tmp_path: Path
) -> None:
    host = make_host("one")
    buffer.policy_version = 5
    host.fleet.update_weights(make_update(tmp_path / "w3", 3))
    host.fleet.update_weights(make_update(tmp_path / "w5", 5))
    host.follower.look()
    assert host.version == 5
    assert host.handles[0].events[-2:] == ["update 3", "update 5"]
