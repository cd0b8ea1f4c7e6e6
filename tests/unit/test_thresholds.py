"""Thresholds of eq. 8: vectors V7, the four schedules, r_tot and the snap for small groups."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from bapo.algorithms.composer import AssemblyView
from bapo.algorithms.reward_levels import levels_within
from bapo.algorithms.settings import AlgorithmConfig
from bapo.algorithms.thresholds import global_mean_reward, reuse_window, scheduled_window, snap
from tests.support.factories import make_hard, make_stat
from tests.support.vectors import vector

EQ8 = AlgorithmConfig(threshold_schedule="eq8")
INVERTED = AlgorithmConfig(threshold_schedule="inverted")
OFFICIAL = AlgorithmConfig(threshold_schedule="official")


@pytest.mark.parametrize("row", vector("V7.c_map")["rows"], ids=lambda row: f"r_tot={row['r_tot']}")
def test_thresholds_are_those_of_the_vectors(row: dict[str, Any]) -> None:
    r_tot = row["r_tot"]
    r_tot = 1 / 3 if r_tot == 0.333333 else r_tot  # its windows are those of 1/3, whose edges are levels
    assert scheduled_window(EQ8, r_tot) == pytest.approx(row["eq8"], abs=1e-6)
    assert scheduled_window(INVERTED, r_tot) == pytest.approx(row["inverted"], abs=1e-6)
    assert scheduled_window(OFFICIAL, r_tot) == pytest.approx(row["official_clamped"], abs=1e-6)
    assert list(levels_within(*scheduled_window(EQ8, r_tot), 8)) == row["k_G8"]
    assert list(levels_within(*scheduled_window(EQ8, r_tot), 4)) == row["k_G4"]
    assert list(levels_within(*scheduled_window(OFFICIAL, r_tot), 8)) == row["official_k_G8"]


def test_a_fixed_window_stays_at_the_low_ends() -> None:
    settings = AlgorithmConfig(threshold_schedule="fixed", c2_range=(0.25, 0.5), c3_range=(0.5, 0.75))
    assert scheduled_window(settings, 0.9) == (0.25, 0.5)


def test_r_tot_outside_of_0_to_1_is_clipped() -> None:
    assert scheduled_window(EQ8, 1.7) == (0.5, 0.625)
    assert scheduled_window(EQ8, -0.3) == (0.125, 0.25)


@pytest.mark.parametrize(
    ("r_tot", "k"),
    [
        (0.4, 1),  # centre 0.3375: 4 * 0.3375 = 1.35
        (0.5, 2),  # centre 0.375: 1.5 rounds to the even 2
        (0.6, 2),  # centre 0.4125: 1.65
    ],
)
def test_a_window_between_the_levels_of_a_small_group_snaps_to_the_nearest(
    r_tot: float, k: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings = AlgorithmConfig(group_size=4)
    with caplog.at_level(logging.INFO):
        window = reuse_window(settings, view_of(bad=0, high=0), r_tot)
    assert window == (k / 4, k / 4)
    assert f"X3 uses k={k}" in caplog.text


def test_snapping_never_takes_a_level_without_variance() -> None:
    # Centre 0.1875 of G = 2 would round to level 0: all wrong.
    assert snap(0.125, 0.25, 2) == (0.5, 0.5)
    assert snap(0.9, 0.95, 2) == (0.5, 0.5)


def test_the_official_schedule_follows_the_mean_of_what_the_buffer_holds() -> None:
    # 3 hard prompts of mean 0 and 3 groups of mean 1: r = 0.5, q = 0.5, although the fresh mean is 0.9.
    assert reuse_window(OFFICIAL, view_of(bad=3, high=3), 0.9) == pytest.approx((0.3125, 0.4375))


def test_the_official_schedule_keeps_the_low_ends_until_it_knows_five_prompts() -> None:
    assert reuse_window(OFFICIAL, view_of(bad=2, high=2), 0.9) == (0.125, 0.25)
    # 4 hard prompts of mean 0 and one group of mean 1: r = 0.2, q = 0, so the high ends.
    assert reuse_window(OFFICIAL, view_of(bad=4, high=1), 0.9) == pytest.approx((0.5, 0.625))


def test_r_tot_is_the_mean_over_all_fresh_responses() -> None:
    fresh = [make_stat(k=8, prompt_id="a"), make_stat(k=0, prompt_id="b"), make_stat(k=1, prompt_id="c")]
    assert global_mean_reward(fresh, None, 0.0) == 9 / 24


def test_the_moving_average_starts_with_the_first_step() -> None:
    fresh = [make_stat(k=4)]
    assert global_mean_reward(fresh, None, 0.9) == 0.5
    assert global_mean_reward(fresh, 0.1, 0.9) == pytest.approx(0.14)
    assert global_mean_reward(fresh, 0.1, 0.0) == 0.5


def view_of(*, bad: int, high: int) -> AssemblyView:
    return AssemblyView(
        step=2,
        fresh=(make_stat(k=4),),
        reevaluated=(),
        bad=tuple(make_hard(prompt_id=f"hard-{i}", mu=0.0) for i in range(bad)),
        high=tuple(make_stat(k=8, prompt_id=f"high-{i}", birth=1) for i in range(high)),
        previous_r_tot=None,
    )


def test_a_window_that_holds_a_level_is_not_moved(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert snap(0.2, 0.325, 8) == (0.2, 0.325)
    assert caplog.text == ""


def test_the_mini_test_takes_exactly_half() -> None:
    settings = AlgorithmConfig(x3_exactly_half=True)
    assert reuse_window(settings, view_of(bad=0, high=0), 0.1) == (0.5, 0.5)
