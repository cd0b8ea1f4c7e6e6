"""X3 that takes the youngest informative groups instead of those of eq. 7, by hand."""

from __future__ import annotations

import pytest

from bapo.algorithms.composer import Reason
from bapo.algorithms.settings import AlgorithmConfig
from tests.support.factories import make_stat
from tests.unit.test_composer import compose

WINDOW = AlgorithmConfig(batch_size=6, c2_range=(2 / 8, 2 / 8), c3_range=(3 / 8, 3 / 8), threshold_schedule="fixed")
"""The window of X3 is k = 2 and 3."""
YOUNGEST = WINDOW.model_copy(update={"x3_policy": "youngest"})
HIGH = [
    make_stat(k=2, prompt_id="window", birth=1), make_stat(k=4, prompt_id="old-half", birth=1),
    make_stat(k=6, prompt_id="six", birth=2), make_stat(k=4, prompt_id="half", birth=2),
    make_stat(k=7, prompt_id="far", birth=3), make_stat(k=5, prompt_id="five", birth=3),
]  # fmt: skip


def test_without_a_window_age_alone_decides() -> None:
    decision = compose(YOUNGEST, fresh={"a": 1, "b": 1}, high=HIGH)
    assert decision.x3 == ("g-five", "g-far", "g-half", "g-six")
    assert {decision.reasons[name] for name in decision.x3} == {Reason.YOUNGEST}


def test_three_and_five_right_of_eight_are_equally_near_and_keep_their_order() -> None:
    high = [make_stat(k=5, prompt_id="first", birth=3), make_stat(k=3, prompt_id="second", birth=3)]
    assert compose(YOUNGEST, fresh={"a": 1}, high=high).x3 == ("g-first", "g-second")


def test_nothing_without_an_advantage_nor_too_old_nor_of_a_prompt_that_trains_is_reused() -> None:
    high = [
        make_stat(k=0, prompt_id="wrong", birth=3), make_stat(k=8, prompt_id="right", birth=3),
        make_stat(k=4, prompt_id="ancient", birth=0), make_stat(k=4, prompt_id="a", birth=3),
        make_stat(k=4, prompt_id="unborn", birth=4),
    ]  # fmt: skip
    assert compose(YOUNGEST, fresh={"a": 1}, high=high).x3 == ()


def test_b_high_takes_every_informative_group_when_the_youngest_are_wanted() -> None:
    fresh = {f"k{k}": k for k in range(9)}
    assert [stat.reward_sum for stat in compose(YOUNGEST, fresh=fresh).high] == [1, 2, 3, 4, 5, 6, 7]
    assert [stat.reward_sum for stat in compose(WINDOW, fresh=fresh).high] == [2, 3]
    assert compose(WINDOW, fresh={"a": 1}, high=[make_stat(k=4, prompt_id="h", birth=3)]).x3 == ()


@pytest.mark.parametrize("settings", [WINDOW, YOUNGEST])
def test_without_x3_nothing_is_reused(settings: AlgorithmConfig) -> None:
    without = settings.model_copy(update={"use_x3": False})
    assert compose(without, fresh={"a": 1}, high=HIGH).x3 == ()
