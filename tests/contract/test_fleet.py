"""The fleet on fake workers: replacement, newest weights first, scaling, and when it gives up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config
from bapo.core.errors import BapoError, ConfigError, StaleWeightsError, WeightMismatchError, WeightsAbsentError
from bapo.core.types import WeightUpdate
from bapo.runtime.metrics.server import Telemetry
from rollout_server.fleet.fleet import Fleet
from tests.full.chaos.aftermath import workers_that_died
from tests.support.fake_worker import FakeHandle
from tests.support.rollout import make_update
from tests.support.wait import wait_until


class Rig:
    def __init__(self, prepare: Callable[[FakeHandle], None], **rollout: object) -> None:
        self.handles: list[FakeHandle] = []
        self.released: list[str] = []
        self.fatal: list[BapoError] = []
        self._prepare = prepare
        self._lock = threading.Lock()
        self.telemetry = Telemetry()
        self.fleet = Fleet(
            Config(rollout=RolloutConfig(**rollout)),
            make_handle=self._make,
            release=self.released.append,
            telemetry=self.telemetry,
            on_fatal=self.fatal.append,
        )

    def _make(self, worker_id: str) -> FakeHandle:
        handle = FakeHandle(worker_id)
        with self._lock:
            self._prepare(handle)
            self.handles.append(handle)
        return handle

    def states(self) -> list[str]:
        return [status.state for status in self.fleet.statuses()]

    def handle(self, worker_id: str) -> FakeHandle:
        return next(handle for handle in self.handles if handle.worker_id == worker_id)


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRig]:
    monkeypatch.setattr("rollout_server.fleet.fleet.POLL_S", 0.01)
    monkeypatch.setattr("rollout_server.fleet.fleet.WATCH_S", 0.01)
    monkeypatch.setattr("rollout_server.fleet.fleet.LONGEST_PAUSE_S", 0.01)
    rigs = []

    def make(prepare: Callable[[FakeHandle], None] = lambda _: None, **rollout: object) -> Rig:
        rig = Rig(prepare, **rollout)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.fleet.stop()


def test_a_worker_that_starts_later_takes_the_newest_weights_before_it_begins(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    rig = make_rig()
    rig.fleet.update_weights(make_update(tmp_path / "w", 5))
    rig.fleet.scale(1)
    wait_until(lambda: rig.states() == ["ready"])
    assert rig.handles[0].events == ["start", "update 5", "begin 5"]


def test_an_update_does_not_wait_for_a_joining_worker_which_begins_with_the_last_one(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    loading, may_go_on = threading.Event(), threading.Event()

    def load_slowly(update: WeightUpdate) -> None:
        if update.version == 5:
            loading.set()
            assert may_go_on.wait(10)

    def prepare(handle: FakeHandle) -> None:
        handle.on_update = load_slowly

    rig = make_rig(prepare)
    rig.fleet.update_weights(make_update(tmp_path / "w", 5))
    rig.fleet.scale(1)
    assert loading.wait(10)
    assert rig.fleet.update_weights(make_update(tmp_path / "v", 6)) == {}
    assert rig.states() == ["starting"]
    may_go_on.set()
    wait_until(lambda: rig.states() == ["ready"])
    assert rig.handles[0].events == ["start", "update 5", "update 6", "begin 6"]
    assert rig.fleet.statuses()[0].policy_version == 6


def test_a_joining_worker_whose_weights_are_deleted_meanwhile_takes_the_newer_ones(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    def overtake(update: WeightUpdate) -> None:
        if update.version == 5:
            rig.fleet.update_weights(make_update(tmp_path / "v", 7))
            raise WeightsAbsentError("version-000005.safetensors is not readable on this host")

    def prepare(handle: FakeHandle) -> None:
        handle.on_update = overtake

    rig = make_rig(prepare)
    rig.fleet.update_weights(make_update(tmp_path / "w", 5))
    rig.fleet.scale(1)
    wait_until(lambda: rig.states() == ["ready"])
    assert rig.handles[0].events == ["start", "update 5", "update 7", "begin 7"]


def test_a_worker_whose_engine_is_stuck_in_a_step_is_replaced(make_rig: MakeRig) -> None:
    rig = make_rig(engine_step_timeout_s=2.0)
    rig.fleet.scale(1)
    wait_until(lambda: rig.states() == ["ready"])
    rig.handles[0].stuck_s = 3.0
    wait_until(lambda: len(rig.handles) == 2 and rig.states() == ["ready"])


def test_a_dead_worker_is_replaced_and_its_leases_are_released(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    rig.fleet.scale(1)
    wait_until(lambda: rig.states() == ["ready"])
    rig.fleet.update_weights(make_update(tmp_path / "w", 5))
    rig.released.clear()
    rig.handles[0].dead = True
    wait_until(lambda: len(rig.handles) == 2 and rig.states() == ["ready"])
    status = rig.fleet.statuses()[0]
    assert (status.worker_id, status.restarts, status.policy_version) == ("worker-0.1", 1, 5)
    assert rig.handles[0].events[-1] == "kill"
    assert rig.handles[1].events == ["start", "update 5", "begin 5"]
    assert rig.released == ["worker-0", "worker-0.1"]


def test_a_worker_that_refuses_an_update_is_replaced_and_does_not_block_the_others(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    rig = make_rig()
    rig.fleet.scale(2)
    wait_until(lambda: rig.states() == ["ready"] * 2)
    rig.handle("worker-0").refuses = WeightMismatchError("the canary differs")
    assert rig.fleet.update_weights(make_update(tmp_path / "w", 5)) == {"worker-1": 0.5}
    wait_until(lambda: rig.states() == ["ready"] * 2)
    assert rig.handle("worker-0.1").events == ["start", "update 5", "begin 5"]
    assert rig.fatal == []


def test_a_worker_that_does_not_answer_an_update_in_time_is_replaced(
    make_rig: MakeRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    rig.fleet.scale(1)
    wait_until(lambda: rig.states() == ["ready"])
    rig.handles[0].refuses = TimeoutError("no response to update_weights within 120 s")
    assert rig.fleet.update_weights(make_update(tmp_path / "w", 5)) == {}
    wait_until(lambda: len(rig.handles) == 2 and rig.states() == ["ready"])
    logged = "\n".join(f"{record.levelname} {record.name}: {record.getMessage()}" for record in caplog.records)
    assert workers_that_died(logged, [])[0].startswith("1 workers died and 0 were killed"), "tests of faults read this"


def test_an_older_version_is_refused_unless_it_is_a_rollback(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    rig.fleet.update_weights(make_update(tmp_path / "w", 5))
    with pytest.raises(StaleWeightsError):
        rig.fleet.update_weights(make_update(tmp_path / "w", 4))
    rig.fleet.update_weights(make_update(tmp_path / "w", 4), rollback=True)
    assert rig.fleet.newest is not None
    assert rig.fleet.newest.version == 4


def test_a_file_that_is_missing_or_cut_off_never_reaches_a_worker(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    rig.fleet.scale(1)
    wait_until(lambda: rig.states() == ["ready"])
    update = make_update(tmp_path / "w", 5)
    (tmp_path / "w").write_bytes(b"cut")
    with pytest.raises(WeightMismatchError, match="3 bytes"):
        rig.fleet.update_weights(update)
    (tmp_path / "w").unlink()
    with pytest.raises(WeightMismatchError):
        rig.fleet.update_weights(update)
    assert rig.handles[0].events == ["start", "begin None"]
    assert rig.fleet.newest is None


def test_scaling_down_drains_the_last_workers_and_scaling_up_starts_new_ones(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.fleet.scale(3)
    wait_until(lambda: rig.states() == ["ready"] * 3)
    rig.fleet.scale(1)
    assert rig.fleet.num_wanted == 1
    wait_until(lambda: rig.states() == ["ready"])
    assert rig.handle("worker-2").events[-2:] == ["drain", "kill"]
    assert rig.handle("worker-0").events == ["start", "begin None"]
    rig.fleet.scale(2)
    wait_until(lambda: rig.states() == ["ready"] * 2)
    assert [status.worker_id for status in rig.fleet.statuses()] == ["worker-0", "worker-1"]


@pytest.mark.parametrize("num", [0, -1, 9])
def test_a_number_of_workers_outside_the_configured_range_is_refused(make_rig: MakeRig, num: int) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.max_workers"):
        make_rig().fleet.scale(num)


def _fail(error: str, message: str) -> Callable[[FakeHandle], None]:
    def prepare(handle: FakeHandle) -> None:
        handle.state, handle.error, handle.message, handle.tail = "failed", error, message, "last words"

    return prepare


def test_a_configuration_that_cannot_work_stops_the_fleet_at_once_with_its_own_message(make_rig: MakeRig) -> None:
    rig = make_rig(_fail("ConfigError", "the tokenizer of the model changes the prompt 'a' to 'b'"))
    rig.fleet.scale(1)
    wait_until(lambda: len(rig.fatal) == 1)
    assert isinstance(rig.fatal[0], ConfigError)
    assert str(rig.fatal[0]) == "the tokenizer of the model changes the prompt 'a' to 'b'"
    assert len(rig.handles) == 1
    assert "the fleet has failed" in rig.fleet.readiness()


def test_workers_that_cannot_even_be_made_end_the_fleet_with_their_reason(make_rig: MakeRig) -> None:
    def fail(_: FakeHandle) -> None:
        raise KeyError("uid not found: 10001")

    rig = make_rig(fail)
    rig.fleet.scale(1)
    wait_until(lambda: rig.fatal != [])
    assert "3 rollout workers in a row died early" in str(rig.fatal[0])
    assert "uid not found: 10001" in str(rig.fatal[0])


def test_a_dead_worker_that_cannot_be_buried_ends_the_fleet_instead_of_leaving_its_place_empty(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    rig.fleet.scale(1)
    wait_until(lambda: rig.states() == ["ready"])
    rig.handle("worker-0").is_immortal = True
    rig.handle("worker-0").dead = True
    wait_until(lambda: rig.fatal != [])
    assert str(rig.fatal[0]) == "the slot of worker-0 failed: RuntimeError('Ray does not answer')"
    assert rig.fatal[0].exit_code == 1  # an accident: whoever watches starts the server again


def test_workers_that_deliver_before_they_die_are_replaced_for_ever(make_rig: MakeRig) -> None:
    def live_shortly(handle: FakeHandle) -> None:
        handle.stored = 1

    rig = make_rig(live_shortly)
    rig.fleet.scale(1)
    for life in range(6):
        wait_until(lambda life=life: len(rig.handles) == life + 1 and rig.states() == ["ready"])
        rig.handles[life].dead = True
    wait_until(lambda: len(rig.handles) == 7 and rig.states() == ["ready"])
    assert rig.fatal == []


def test_stopping_kills_every_worker_and_releases_its_leases(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.fleet.scale(2)
    wait_until(lambda: rig.states() == ["ready"] * 2)
    rig.released.clear()
    rig.fleet.stop()
    assert [handle.events[-1] for handle in rig.handles] == ["kill", "kill"]
    assert sorted(rig.released) == ["worker-0", "worker-1"]
    assert rig.fleet.statuses() == []
