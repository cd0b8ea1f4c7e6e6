"""The autoscaling rule: vectors worked out by hand, and what must hold for every run.

By hand, with headroom 0.1 and hysteresis 0.2: c = 10 groups/s and p = 2.5 groups/s need 10 * 1.1 / 2.5 = 4.4 workers;
the band is ceil(4.4 / 1.2) = 4 to ceil(4.4 * 1.2) = 6.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo.config.autoscaling import AutoscalingConfig, ScalingReason
from rollout_server.autoscaling.rule import HEADROOM, HYSTERESIS, INPUTS, Observation, ScalingDecision, State, decide

MOST = 20
SETTINGS = AutoscalingConfig(up_cooldown_s=0, down_cooldown_s=0)
SEEN_BEFORE = State(windows=5)
"""Enough windows to act; no averages yet, so that the observation alone counts."""


def seen(wanted: int = 5, **changes: Any) -> Observation:
    """A run in balance: 5 workers, 4.4 needed."""
    balanced = Observation(
        wanted=wanted, ready=wanted, wait_share=0.02, idle_share=0.2, ready_batches=1.5, consume_rate=10.0,
        produce_rate=2.5, stale_share=0.0, version_lag=1, spare_share=0.0, lag_bound=2,
    )  # fmt: skip
    return replace(balanced, **changes)


def decision(
    observation: Observation, settings: AutoscalingConfig = SETTINGS, state: State = SEEN_BEFORE
) -> ScalingDecision:
    return decide(settings, MOST, state, observation, 1000.0)[1]


@pytest.mark.parametrize(
    ("observation", "desired", "reason"),
    [
        (seen(4), 4, "matched"),
        (seen(5), 5, "matched"),
        (seen(6), 6, "matched"),
        (seen(3), 5, "rate_above"),  # 3 < 4 = ceil(4.4 / 1.2): becomes ceil(4.4)
        (seen(7), 7, "matched"),  # busy = 7 * 0.8 * 1.1 = 6.16: the band ends at ceil(6.16 * 1.2) = 8
        (seen(7, idle_share=0.5), 6, "rate_below"),  # busy = 3.85 < 4.4: 7 > 6, to ceil(4.4) = 5, one at a time
        (seen(5, wait_share=0.3, idle_share=0.05, ready_batches=0.2), 6, "learner_waits"),
        (
            seen(5, wait_share=0.3, idle_share=0.5, ready_batches=0.2),
            5,
            "matched",
        ),  # they take turns: max_steps_ahead = 0
        (seen(5, wait_share=0.3, idle_share=0.05, ready_batches=1.2), 5, "matched"),  # a whole batch is there
        (seen(6, idle_share=0.4, ready_batches=4.0), 5, "groups_wait"),  # busy = 3.96, need = 4.4: 5 suffice
        (seen(5, idle_share=0.4, ready_batches=4.0), 5, "matched"),  # 4 would not suffice
        (seen(5, stale_share=0.1), 4, "groups_stale"),
        (seen(2, consume_rate=40.0), 6, "rate_above"),  # 17.6 workers are needed, at most 4 more at a time
        (seen(19, consume_rate=80.0), 20, "rate_above"),  # 35.2 are needed, 20 is the bound
        (seen(25), 20, "bounds"),
    ],
)
def test_vectors_worked_out_by_hand(observation: Observation, desired: int, reason: str) -> None:
    found = decision(observation)
    assert (found.desired, found.reason.value) == (desired, reason)


def test_need_is_the_quotient_of_the_rates_with_headroom() -> None:
    assert decision(seen()).need == pytest.approx(4.4)


def test_rates_are_averaged_over_windows_and_shares_begin_again_with_another_number() -> None:
    # Three windows: the newest weighs 2 / 4. c: 10, then 10 + (20 - 10) / 2 = 15.
    state, _ = decide(SETTINGS, MOST, State(), seen(), 0.0)
    state, found = decide(SETTINGS, MOST, state, seen(consume_rate=20.0, wait_share=0.06), 15.0)
    assert state.changed_s == 15.0, "15 * 1.1 / 2.5 = 6.6 and ceil(6.6 / 1.2) = 6 > 5"
    assert (found.desired, found.need) == (7, pytest.approx(6.6))
    assert (state.consume_rate, state.produce_rate) == (15.0, 2.5)
    assert (state.wait_share, state.idle_share, state.windows) == (None, None, 0)


@pytest.mark.parametrize("name", INPUTS)
def test_it_holds_when_an_input_is_missing_and_says_which(name: str) -> None:
    starving = seen(2, wait_share=0.9, idle_share=0.0, ready_batches=0.0)
    assert decision(starving).desired > 2
    found = decision(replace(starving, **{name: None}))
    assert (found.desired, found.reason, found.missing) == (2, ScalingReason.MISSING, (name,))


def test_it_does_not_act_on_one_window() -> None:
    found = decision(seen(3), state=State())
    assert (found.desired, found.reason) == (3, ScalingReason.MEASURING)


shares = st.floats(0, 1)
rates = st.floats(0.01, 1000)
observations = st.builds(
    Observation,
    wanted=st.integers(1, 30),
    ready=st.integers(0, 30),
    wait_share=st.none() | shares,
    idle_share=st.none() | shares,
    ready_batches=st.none() | st.floats(0, 10),
    consume_rate=st.none() | rates,
    produce_rate=st.none() | rates,
    stale_share=st.none() | shares,
    version_lag=st.none() | st.integers(0, 10),
    spare_share=shares,
    lag_bound=st.integers(0, 5),
)


@given(st.lists(observations, max_size=20), st.integers(1, 5), st.integers(5, 15))
def test_the_bounds_are_never_crossed(history: list[Observation], least: int, most: int) -> None:
    settings = AutoscalingConfig(min_workers=least, up_cooldown_s=0, down_cooldown_s=0)
    state = State()
    for i, observation in enumerate(history):
        state, found = decide(settings, most, state, observation, float(i))
        assert least <= found.desired <= most


whole = st.builds(
    seen,
    st.integers(1, 19),
    wait_share=shares,
    idle_share=shares,
    ready_batches=st.floats(0, 10),
    consume_rate=rates,
    produce_rate=rates,
    stale_share=shares,
)


@given(
    st.integers(1, 15),
    st.floats(0.5, 12),
    st.lists(st.tuples(st.floats(0, 0.999), st.floats(0, 1)), min_size=5, max_size=40),
)
def test_rates_that_wander_inside_the_band_turn_the_number_round_at_most_once(
    start: int, least_need: float, noise: list[tuple[float, float]]
) -> None:
    """Needs between N and N (1 + hysteresis), queues that say anything but starvation: no flapping."""
    state, number, numbers = SEEN_BEFORE, start, [start]
    for i, (share, queue) in enumerate(noise):
        need = least_need * (1 + HYSTERESIS * share)
        # Workers that are there and not needed idle, as they do in a run whose learner does not wait.
        idle = max(0.0, 1 - need / (1 + HEADROOM) / number)
        observation = seen(
            number, consume_rate=need / 1.1, produce_rate=1.0, idle_share=idle, ready_batches=4 * queue, wait_share=0.0
        )
        state = replace(state, consume_rate=None, produce_rate=None)  # the averages would only calm it down
        state, found = decide(SETTINGS, MOST, state, observation, float(i))
        number = found.desired
        numbers.append(number)
    steps = [after - before for before, after in pairwise(numbers) if after != before]
    turns = sum((a > 0) != (b > 0) for a, b in pairwise(steps))
    assert turns <= 1, numbers
