"""What the rollout server measures for the autoscaling rule, and what it does with the answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bapo.algorithms.settings import AlgorithmConfig, CadenceConfig
from bapo.config.autoscaling import AutoscalingConfig, ScalingReason
from bapo.config.learner import LearnerConfig
from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config, RunConfig
from bapo.runtime.metrics.metric import Process
from bapo.runtime.metrics.server import Telemetry
from bapo.transport.messages import WorkerLeases
from bapo.transport.rollout_client import WorkerStatus
from rollout_server.autoscaling.autoscaler import Autoscaler
from rollout_server.autoscaling.window import Moment, Window
from tests.unit.test_scheduler import STATUS


def config(**autoscaling: Any) -> Config:
    return Config(
        run=RunConfig(num_steps=100),
        algorithm=AlgorithmConfig(batch_size=8),
        cadence=CadenceConfig(weight_sync_interval=2, reevaluation_interval=2, max_steps_ahead=1),
        learner=LearnerConfig(minibatch_size=4),
        rollout=RolloutConfig(num_workers=2, max_workers=6, max_groups_in_flight=10),
        autoscaling=AutoscalingConfig(**{"window_s": 4.0, "up_cooldown_s": 0.0, **autoscaling}),
    )


def worker(index: int, inflight: int, *, state: str = "ready", version: int = 1) -> WorkerStatus:
    return WorkerStatus(
        worker_id=f"worker-{index}", state=state, policy_version=version, tokens_per_s=0.0, inflight=inflight,
        restarts=0, pid=1, rss_bytes=1,
    )  # fmt: skip


def look(time_s: float, *workers: WorkerStatus, stored: int = 0, stale: int = 0, wanted: int = 2, **at: Any) -> Moment:
    return Moment(
        time_s=time_s, wanted=wanted, workers=workers, stored=stored, stale=stale, status=replace(STATUS, **at)
    )  # fmt: skip


def test_a_window_is_measured_as_by_hand() -> None:
    """Four seconds: the learner waits in one of them; two workers hold 10 and 5 of 10, then 5 and 5."""
    window = Window(config(), look(10.0, stored=100, step=3, assembled_step=3, policy_version=2))
    full, half = worker(0, 13, version=2), worker(1, 5, version=4)
    window.add(look(12.0, full, half, stored=104, step=4, assembled_step=4, policy_version=4))
    assert not window.is_over, "four seconds have not passed"
    window.add(look(13.0, worker(0, 5, version=2), half, stored=106, step=5, assembled_step=4, policy_version=4))
    last = look(
        14.0, worker(0, 5, version=2), half, worker(2, 9, state="starting"),
        stored=118, stale=2, wanted=3, step=5, assembled_step=5, policy_version=4, fresh_ready=12,
    )  # fmt: skip
    window.add(last)
    assert window.is_over
    seen = window.observation()
    assert (seen.wanted, seen.ready) == (3, 2)
    assert seen.wait_share == pytest.approx(1 / 4)
    # Work: 1.5 workers for 2 s, then 1.0 for 2 s: 5 of 8 worker seconds.
    assert seen.idle_share == pytest.approx(3 / 8)
    assert seen.produce_rate == pytest.approx(18 / 5)
    assert seen.spare_share == pytest.approx(1 / 2), "5 and 5 of 10 and 10 in the one second of waiting"
    # Steps 4 and 5 took 8 fresh groups each, in the 3 s that the learner did not wait.
    assert seen.consume_rate == pytest.approx(16 / 3)
    assert seen.ready_batches == pytest.approx(12 / 8)
    assert seen.stale_share == pytest.approx(2 / 20)
    assert (seen.version_lag, seen.lag_bound) == (3, 2)


def test_held_out_groups_are_no_work_for_training() -> None:
    window = Window(config(), look(0.0, step=1))
    held = {"fresh": 5, "evaluate": 15}
    window.add(look(4.0, worker(0, 10), stored=8, step=1, leased=held))
    # A quarter of what the one worker held for 4 s was fresh.
    assert window.observation().produce_rate == pytest.approx(8.0)


class FakeFleet:
    """Remembers what it was scaled to."""

    def __init__(self) -> None:
        self.num_wanted = 2
        self.prefix = ""
        self.scaled: list[int] = []
        self.inflight = 13
        self.counts: Counter[str] = Counter()
        self.metrics = SimpleNamespace(total=lambda key: self.counts[key])

    def scale(self, number: int) -> None:
        self.scaled.append(number)
        self.num_wanted = number

    def statuses(self) -> list[WorkerStatus]:
        return [worker(i, self.inflight, version=1) for i in range(self.num_wanted)]


class Rig:
    """Seconds pass when the test says so; the learner takes a batch of 8 every second that it has one."""

    def __init__(self, room: int | None = None, **autoscaling: Any) -> None:
        self.fleet, self.telemetry, self.now, self.room = FakeFleet(), Telemetry(Process.ROLLOUT_SERVER), 0.0, room
        self.state = replace(STATUS, step=1, assembled_step=0, policy_version=1)
        self.scaler = Autoscaler(
            config(**autoscaling),
            self.fleet,  # type: ignore[arg-type]
            SimpleNamespace(status=lambda: self.state),  # type: ignore[arg-type]
            self.telemetry,
            room=None if room is None else lambda: self.room or 0,
            clock=lambda: self.now,
        )

    def starve(self, seconds: int) -> None:
        """The learner has a batch in every fourth second, and waits in the others; workers are full."""
        for _ in range(seconds):
            self.now += 1.0
            step = int(self.now) // 4 + 1
            waits = int(self.now) % 4 != 0
            self.fleet.counts["groups/fresh/stored"] += self.fleet.num_wanted
            self.state = replace(self.state, step=step, assembled_step=step - waits, policy_version=step)
            self.scaler.turn()

    def gauge(self, name: str, **labels: str) -> float | None:
        return self.telemetry.registry.get_sample_value(name, labels)

    def reason(self) -> list[str]:
        return [r.value for r in ScalingReason if self.gauge("bapo_rollout_scaling_reason", reason=r.value) == 1]


def test_a_fleet_whose_learner_starves_grows_to_its_bound_and_not_beyond() -> None:
    rig = Rig(actuator="fleet", max_workers=5)
    rig.starve(60)
    assert rig.fleet.scaled[-1] == 5
    assert max(rig.fleet.scaled) == 5
    assert rig.gauge("bapo_rollout_desired_workers") == 5
    assert rig.gauge("bapo_rollout_learner_wait_ratio") == pytest.approx(0.75)
    assert "use off" in rig.scaler.refusal


def test_outside_actuators_are_told_and_the_fleet_is_left_alone() -> None:
    rig = Rig(actuator="external")
    rig.starve(60)
    assert rig.fleet.scaled == []
    # 8 groups/s while it trains, 1 group/s per worker: 8.8 are needed, 6 is the bound; 2 + 4 at once.
    assert rig.gauge("bapo_rollout_desired_workers") == 6
    assert rig.scaler.refusal == ""


def test_one_of_several_servers_counts_the_workers_of_the_others() -> None:
    rig = Rig(actuator="external", max_workers=5)
    rig.fleet.prefix = "here-"
    heard = {"here-worker-0": 0.1, "there-worker-0": 1.0, "there-worker-1": 59.0, "gone-worker-0": 61.0}
    workers = {name: WorkerLeases(leased=1, silent_s=silent_s) for name, silent_s in heard.items()}
    rig.state = replace(rig.state, workers=workers)
    rig.starve(3)
    # Two of this server, two of the other; the fourth has been silent for half a lease.
    assert rig.scaler._desired == 4
    rig.starve(60)
    assert rig.gauge("bapo_rollout_desired_workers") == 5
    assert rig.fleet.scaled == []
