"""A real run whose rollout server follows the load by itself: more workers while groups are slow, fewer when not.

The scripted engine in threads, real Redis, buffer service, learner and scheduler. Groups take 1.5 s, and a twentieth of
that from version 10 on: `slow_versions` of the engine.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.launch import kill_family, start, train_arguments
from tests.support.wait import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

LONG_S = 240.0
DECISION = re.compile(r"autoscaling desired=(\d+) wanted=(\d+) .*reason=(\w+)")
SETTINGS = {
    "rollout.max_workers": 4, "rollout.max_groups_in_flight": 2, "cadence.slack": 3,
    "rollout.engine_options": "{latency_s = 0.075, slow_versions = [1, 9], slow_times = 20.0}",
    "autoscaling.actuator": "fleet", "autoscaling.window_s": 3.0, "autoscaling.up_cooldown_s": 0.0,
    "autoscaling.down_cooldown_s": 4.0, "autoscaling.max_workers": 3, "evaluation.every": 0,
}  # fmt: skip


def test_workers_come_while_groups_are_slow_and_go_when_they_are_fast(tmp_path: Path) -> None:
    overrides = [word for key, value in SETTINGS.items() for word in (f"--{key}", str(value))]
    process = start(train_arguments(tmp_path, *overrides, num_steps=100_000))
    run = RunDirectory(tmp_path / "outputs" / "run")

    def changes() -> list[tuple[int, int, str]]:
        """(desired, wanted before, reason) of every change so far."""
        assert process.poll() is None, process.communicate()[0]
        log = run.log_path("rollout_server")
        text = log.read_text() if log.exists() else ""
        found = [(int(a), int(b), c) for a, b, c in DECISION.findall(text)]
        return [change for change in found if change[0] != change[1]]

    try:
        wait_until(lambda: any(desired == 3 for desired, _, _ in changes()), timeout_s=LONG_S, what="three workers")
        up = changes()
        assert {reason for _, _, reason in up} <= {"rate_above", "learner_waits"}, up
        wait_until(lambda: any(desired == 1 for desired, _, _ in changes()), timeout_s=LONG_S, what="one worker again")
        assert all(1 <= desired <= 3 for desired, _, _ in changes())
        step = len(run.read_metrics())
        wait_until(lambda: len(run.read_metrics()) > step + 3, timeout_s=LONG_S, what="steps with one worker")
        rows = run.read_metrics()
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        fates = [fate for _, found in run.read_groups() for fate in found]
        assert len({fate.worker_id for fate in fates}) >= 3, "three workers have sampled"
        # Scale-in drains: nothing that a leaving worker held was lost or came twice.
        fresh = [fate.group_id for fate in fates if fate.group_id.startswith("fresh-")]
        assert len(set(fresh)) >= 8 * (len(rows) - 1)
    finally:
        kill_family(process)
