"""The online filter of appendix A.3: vectors V11 and the four modes."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest

from bapo.algorithms.filters import filtered_fresh, keep_probability, online_filter
from bapo.algorithms.settings import AlgorithmConfig
from bapo.core.types import GroupStat
from tests.support.factories import make_stat
from tests.support.vectors import vector

RANGE = AlgorithmConfig(online_filter="range")


def stats(*ks: int) -> list[GroupStat]:
    return [make_stat(k=k, prompt_id=f"p{i}") for i, k in enumerate(ks)]


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ("00000000", False),
        ("10000000", True),  # mu = 1/G: the lower bound is inclusive
        ("11111110", True),  # mu = (G-1)/G: so is the upper
        ("11111111", False),
    ],
)
def test_range_drops_groups_without_signal(rewards: str, kept: bool) -> None:
    assert bool(online_filter(RANGE, [make_stat(rewards=rewards)], Random(0))) is kept


def test_gaussian_keep_probabilities_are_those_of_the_vectors() -> None:
    want = vector("V11.gaussian_accept_prob_k0..8")["p"]
    assert [keep_probability(k / 8, 0.5, 0.2) for k in range(9)] == pytest.approx(want, abs=1e-6)


def test_gaussian_weights_of_the_levels_with_a_signal_are_those_of_the_vectors() -> None:
    want = vector("V11.gaussian_accept_prob_k0..8")["normalised_k1_7"]
    weights = [keep_probability(k / 8, 0.5, 0.2) for k in range(1, 8)]
    assert [weight / sum(weights) for weight in weights] == pytest.approx(want, abs=1e-6)


def test_the_released_weights_are_the_same_curve_over_levels_0_to_7_around_their_midpoint() -> None:
    """Two levels wide. It draws 75 % of the responses; ours draws groups that have a signal (docs/paper.md)."""
    want, center, width = vector("V11.official_gaussian_levels0_7_sigma2"), 3.5 / 8, 2 / 8
    weights = [keep_probability(k / 8, center, width) for k in range(8)]
    assert [weight / sum(weights) for weight in weights] == pytest.approx(want["w"], abs=1e-6)


def test_gaussian_keeps_each_level_as_often_as_its_probability() -> None:
    settings = AlgorithmConfig(online_filter="gaussian")
    num = 4000
    fresh = [make_stat(k=k, prompt_id=f"{k}-{i}") for k in (0, 1, 4, 6, 8) for i in range(num)]
    kept = Counter(round(stat.reward_sum) for stat in online_filter(settings, fresh, Random(1)))
    assert kept[0] == kept[8] == 0  # after the range filter
    assert kept[4] == num  # the peak of p is 1
    for k, probability in ((1, 0.172422), (6, 0.457833)):
        four_sigma = 4 * math.sqrt(num * probability * (1 - probability))
        assert abs(kept[k] - num * probability) < four_sigma


def test_uniform_asks_no_question_about_quality() -> None:
    settings = AlgorithmConfig(online_filter="uniform")
    fresh = stats(*[0] * 5, *[8] * 5)
    assert len(online_filter(settings, fresh, Random(0))) == 6
    assert (
        len(online_filter(AlgorithmConfig(online_filter="uniform", uniform_share=0.29), stats(*[0] * 100), Random(0)))
        == 29
    )


@pytest.mark.parametrize("mode", ["range", "gaussian", "uniform", "none"])
def test_every_filter_keeps_the_order_and_repeats_with_the_same_seed(mode: str) -> None:
    settings = AlgorithmConfig.model_validate({"online_filter": mode})
    fresh = stats(*[k for k in range(9) for _ in range(20)])
    kept = online_filter(settings, fresh, Random(3))
    assert kept == online_filter(settings, fresh, Random(3))
    assert [stat for stat in fresh if stat in kept] == kept
    assert kept


def test_every_fresh_group_gets_the_word_for_its_result() -> None:
    fresh = (
        make_stat(rewards="0000", prompt_id="a"),
        make_stat(rewards="1111", prompt_id="b"),
        make_stat(rewards=[0.5] * 4, prompt_id="c"),
        make_stat(rewards="0011", prompt_id="d"),
        make_stat(rewards="0111", prompt_id="d", group_id="second-d"),
    )
    x1, reasons = filtered_fresh(RANGE, fresh, Random(0))
    assert [stat.group_id for stat in x1] == ["g-d"]
    assert reasons == {
        "g-a": "all_incorrect",
        "g-b": "all_correct",
        "g-c": "no_variance",
        "g-d": "informative",
        "second-d": "duplicate_prompt",
    }


def test_none_keeps_all() -> None:
    fresh = stats(0, 3, 8)
    assert online_filter(AlgorithmConfig(online_filter="none"), fresh, Random(0)) == fresh


def test_a_group_that_a_draw_left_out_is_called_filtered() -> None:
    settings = AlgorithmConfig(online_filter="gaussian", gaussian_center=0.0, gaussian_width=0.01)
    _, reasons = filtered_fresh(settings, (make_stat(k=4),), Random(0))
    assert reasons == {"g-p": "filtered"}
