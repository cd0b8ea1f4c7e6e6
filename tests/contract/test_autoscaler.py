"""What the rollout server measures for the autoscaling rule, and what it does with the answer."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from bapo.algorithms.autoscaling.rule import Reason
from bapo.algorithms.autoscaling.settings import AutoscalingConfig
from bapo.algorithms.settings import AlgorithmConfig, CadenceConfig
from bapo.config.learner import LearnerConfig
from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config, RunConfig
from bapo.fleet_client import WorkerStatus
from bapo.messages import BufferStatus
from bapo.metrics.metric import Process
from bapo.telemetry import Telemetry
from rollout_server.autoscaler import GAUGES, Autoscaler

IDLE = BufferStatus(
    run="run", step=0, policy_version=0, assembled_step=0, committed_step=0, checkpointed_step=0, cursor=0,
    fresh_dropped=0, queued={}, leased={}, fresh_ready=0, reevaluated_ready=0, num_bad=0, num_high=0, r_tot=None,
    c2=None, c3=None, evaluations={}, reevaluation_rounds={}, workers={}, failures_in_a_row=0, last_failure="",
    num_bytes=0, batches=[],
)  # fmt: skip


def config(**autoscaling: Any) -> Config:
    return Config(
        run=RunConfig(num_steps=100),
        algorithm=AlgorithmConfig(batch_size=8),
        cadence=CadenceConfig(v=2, m=2, slack=1),
        learner=LearnerConfig(minibatch_size=4),
        rollout=RolloutConfig(num_workers=2, max_workers=6, max_groups_in_flight=10),
        autoscaling=AutoscalingConfig(**{"window_s": 4.0, "up_cooldown_s": 0.0, **autoscaling}),
    )


def worker(index: int, inflight: int, *, state: str = "ready", version: int = 1) -> WorkerStatus:
    return WorkerStatus(
        worker_id=f"worker-{index}", state=state, policy_version=version, tokens_per_s=0.0, inflight=inflight,
        restarts=0, pid=1, rss_bytes=1,
    )  # fmt: skip


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
        self.state = replace(IDLE, step=1, assembled_step=0, policy_version=1)
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
        return [r.value for r in Reason if self.gauge("bapo_rollout_scaling_reason", reason=r.value) == 1]


def test_the_metrics_are_there_from_the_first_moment_in_every_mode() -> None:
    for mode in ("off", "fleet", "external"):
        rig = Rig(actuator=mode)
        assert rig.gauge("bapo_rollout_desired_workers") == 2
        assert rig.reason() == ["off" if mode == "off" else "measuring"]
        assert all(math.isnan(rig.gauge(name) or 0.0) for name in GAUGES.values()), "unknown is not 0"
