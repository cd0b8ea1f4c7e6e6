"""The rollout server: what ends its own thread, and servers side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from bapo.config.tree import Config
from bapo.core.errors import BapoError, UnavailableError
from bapo.core.types import Progress
from bapo.runtime.metrics.metric import Process
from bapo.runtime.metrics.server import Telemetry
from bapo.runtime.rank_environment import free_port
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.buffer_client import BufferClient
from rollout_server.__main__ import Runner
from rollout_server.fleet.fleet import Fleet
from rollout_server.fleet.target import recall_target, remember_target
from rollout_server.weights.newest import Follower, remember
from tests.support.buffer import new_store
from tests.support.buffer_app import serving
from tests.support.factories import make_request
from tests.support.fake_worker import FakeHandle
from tests.support.rollout import make_config, make_update
from tests.support.wait import wait_until

CONFIG = make_config()


def test_a_fleet_whose_thread_fails_ends_the_server_and_names_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Runner) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(Runner, "_run_fleet", fail)
    config = Config.model_validate({"rollout": {"engine": "scripted"}})
    telemetry = Telemetry(Process.ROLLOUT_SERVER, run="test")
    ends: list[str] = []
    runner = Runner(config, RunDirectory(tmp_path), "http://127.0.0.1:1", telemetry)
    runner.start(on_end=lambda: ends.append("ended"))
    runner.stop()
    assert ends == ["ended"]
    assert runner.fleet.fatal is not None
    assert "KeyError('lost')" in str(runner.fleet.fatal)
    assert runner.fleet.fatal.exit_code == 1


def test_workers_begin_with_the_newest_weights_also_when_the_buffer_comes_later_than_the_fleet(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory.create(tmp_path / "run")
    release_s = 0.2
    monkeypatch.setattr("rollout_server.__main__.RELEASE_S", release_s)
    monkeypatch.setattr("rollout_server.__main__.BufferClient", partial(BufferClient, retry_s=0.1))
    remember(run.weights_path, make_update(run.weights_path / "version-000004.safetensors", 4))
    port = free_port()
    runner = Runner(CONFIG, run, f"http://127.0.0.1:{port}", Telemetry(Process.ROLLOUT_SERVER, run="test"))
    runner.start(on_end=lambda: None)
    try:
        time.sleep(2 * release_s)
        assert runner.fleet.statuses() == [], "nothing is sampled with other weights"
        store = new_store(redis_url)
        store.report(Progress(step=4, policy_version=4))
        with serving(store, CONFIG, port=port):
            wait_until(lambda: [status.policy_version for status in runner.fleet.statuses()] == [4])
            runner.stop()
    finally:
        runner.stop()


def test_leases_of_replaced_workers_of_an_earlier_life_are_given_back(redis_url: str, tmp_path: Path) -> None:
    store = new_store(redis_url)
    store.enqueue([make_request(prompt_id=f"p{i}", min_version=9) for i in range(3)], cursor=3)
    for name in ("worker-0.2", "worker-7", "their-worker-0"):
        assert len(store.claim(name, limit=1, policy_version=9, with_fresh=True)) == 1
    with serving(store, CONFIG) as buffer:
        run = RunDirectory.create(tmp_path / "run")
        runner = Runner(CONFIG, run, buffer.url, Telemetry(Process.ROLLOUT_SERVER, run="test"))
        runner.start(on_end=lambda: None)
        wait_until(lambda: any(status.state == "ready" for status in runner.fleet.statuses()))
        held = {name: worker.leased for name, worker in buffer.status().workers.items() if worker.leased}
        assert held == {"their-worker-0": 1}
        assert buffer.status().queued["fresh"] == 2
        runner.stop()


@pytest.mark.parametrize(
    ("started_again", "num_workers", "num"),
    [(False, 1, 3), (True, 1, 1), (False, 2, 2)],
    ids=["restarted", "run started again", "config changed"],
)
def test_a_restarted_server_has_the_workers_of_bapo_scale_until_the_run_starts_again(
    redis_url: str, tmp_path: Path, started_again: bool, num_workers: int, num: int
) -> None:
    run = RunDirectory.create(tmp_path / "run")
    run.update_run(started_at=100.0)

    def serve(config: Config, scale_to: int | None) -> int:
        runner = Runner(config, run, buffer.url, Telemetry(Process.ROLLOUT_SERVER, run="test"))
        runner.start(on_end=lambda: None)
        wait_until(lambda: runner.fleet.num_wanted > 0)
        if scale_to is not None:
            runner.scale(scale_to)
        num_wanted = runner.fleet.num_wanted
        runner.stop()
        return num_wanted

    with serving(new_store(redis_url), CONFIG) as buffer:
        assert serve(CONFIG, scale_to=3) == 3
        if started_again:
            run.update_run(started_at=200.0)
        config = CONFIG.model_copy(update={"rollout": CONFIG.rollout.model_copy(update={"num_workers": num_workers})})
        assert serve(config, scale_to=None) == num


def test_a_damaged_record_of_bapo_scale_leaves_the_configured_number(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    remember_target(run, "", CONFIG, 3)
    assert recall_target(run, "", CONFIG) == 3
    assert recall_target(run, "host-b-", CONFIG) == 1
    for content in ("", "[]", '{"num": "3"}'):
        (run.weights_path / "workers.json").write_text(content)
        assert recall_target(run, "", CONFIG) == 1


# -- servers side by side


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
    other.follower.poll()
    assert (one.version, other.version) == (3, 3)
    assert other.handles[0].events == ["start", "begin None", "update 3"]


def test_a_note_of_an_earlier_attempt_at_the_run_is_not_followed(
    make_host: MakeHost, buffer: Buffer, tmp_path: Path
) -> None:
    remember(tmp_path, make_update(tmp_path / "w", 9))
    host = make_host("one")
    host.follower.poll()
    assert host.version == 1
    assert host.fleet.newest is None


def test_a_learner_that_went_back_takes_all_of_them_back(make_host: MakeHost, buffer: Buffer, tmp_path: Path) -> None:
    one, other = make_host("one"), make_host("other")
    buffer.policy_version = 8
    one.fleet.update_weights(make_update(tmp_path / "w8", 8))
    other.follower.poll()
    one.fleet.update_weights(make_update(tmp_path / "w4", 4), rollback=True)
    other.follower.poll()
    assert (one.version, other.version) == (4, 4)


def test_an_update_of_its_own_is_never_undone_by_an_older_note(
    make_host: MakeHost, buffer: Buffer, tmp_path: Path
) -> None:
    host = make_host("one")
    buffer.policy_version = 5
    host.fleet.update_weights(make_update(tmp_path / "w3", 3))
    host.fleet.update_weights(make_update(tmp_path / "w5", 5))
    host.follower.poll()
    assert host.version == 5
    assert host.handles[0].events[-2:] == ["update 3", "update 5"]
