"""The simulated run follows its load under the rule, and the simulation itself counts right."""

from __future__ import annotations

import pytest

from bapo.algorithms.autoscaling.settings import AutoscalingConfig
from benchmarks.autoscaling.simulation import Costs, Point, Setting, Simulation, changes_of, shares

COSTS = Costs(learner_step_s=1.0, group_s=1.0, start_s=10.0, sync_s=0.0)


def run(**changes: object) -> list[Point]:
    base = {"costs": COSTS, "batch_size": 8, "room": 4, "v": 1, "slack": 4, "num_workers": 4, "seconds": 600.0}
    return Simulation(setting=Setting(**(base | changes))).run()  # type: ignore[arg-type]


def test_without_a_rule_shares_are_those_of_the_rates() -> None:
    """4 workers of 4 groups/s each against a learner of 8 groups/s: they idle half of the time, it never waits."""
    waits, idle, ready = shares(run(), 100, 600)
    assert waits == pytest.approx(0.0, abs=0.02)
    assert idle == pytest.approx(0.5, abs=0.03)
    assert ready == 4
    # And 1 worker of 4 groups/s: the learner waits half of the time.
    waits, idle, _ = shares(run(num_workers=1), 100, 600)
    assert waits == pytest.approx(0.5, abs=0.03)
    assert idle == pytest.approx(0.0, abs=0.02)


def test_the_rule_finds_the_number_that_the_rates_ask_for_from_both_sides() -> None:
    """c = 8, p = 4: 2.2 workers are needed with headroom; the band is ceil(2.2 / 1.2) = 2 to ceil(2.2 * 1.2) = 3."""
    for number in (1, 8):
        points = run(num_workers=number, seconds=1200.0, autoscaling=AutoscalingConfig(actuator="fleet"))
        assert points[-1].desired in (2, 3), number
        waits, _, _ = shares(points, 1000, 1200)
        assert waits < 0.05


def test_the_bounds_hold_while_the_load_changes() -> None:
    rule = AutoscalingConfig(actuator="fleet", min_workers=2, max_workers=5)
    points = run(num_workers=2, most_workers=5, autoscaling=rule, changes=((100.0, 9.0, 1.0), (400.0, 0.1, 1.0)))
    assert {point.desired for point in points} <= {2, 3, 4, 5}
    assert max(point.desired for point in points) == 5


def test_the_band_saves_most_changes_when_the_load_wanders() -> None:
    calm = AutoscalingConfig(actuator="fleet")
    nervous = calm.model_copy(
        update={"hysteresis": 0.0, "smoothing_windows": 1, "up_cooldown_s": 0.0, "down_cooldown_s": 0.0}
    )
    with_band, without = (run(drift=0.15, seconds=1500.0, autoscaling=rule) for rule in (calm, nervous))
    assert changes_of(with_band) < changes_of(without) / 2
