"""Whom of B_bad a round asks, and how many: the expected gain of a prompt and the budget, by hand."""

from __future__ import annotations

import random

import pytest

from bapo.algorithms.composers.bapo import Bapo
from bapo.algorithms.randomness import rng_for
from bapo.algorithms.reevaluation import SamplingCost, beta_binomial, budget, cost_before, expected_gain, most_promising
from bapo.algorithms.settings import AlgorithmConfig
from tests.support.factories import make_hard

GAIN = AlgorithmConfig(batch_size=6, hard_prompt_sampling="gain", max_reevaluated=4)


@pytest.mark.parametrize(
    ("mu", "attempts", "gain"),
    [
        (0.0, 0, 0.205841),  # Beta(1, 9):  1 - 9/17 - 9/34 - P(8)
        (1 / 8, 0, 0.452571),  # Beta(2, 8):  1 - 72/272 - 1152/4080 - P(8)
        (0.0, 1, 0.133328),  # Beta(1, 13): 1 - 13/21 - 104/420 - P(8)
    ],
)
def test_the_expected_gain_is_the_chance_of_two_to_seven_right_of_eight(mu: float, attempts: int, gain: float) -> None:
    assert expected_gain(make_hard(mu=mu, attempts=attempts), 8, 1 / 8) == pytest.approx(gain, abs=1e-6)


def test_older_failures_count_half_of_the_next_newer_ones() -> None:
    # Two failures are 8/2 + 8/4 = 6 wrong responses more: Beta(1, 15), P(0) = 15/23, P(1) = 8 * 15 / (22 * 23).
    found = expected_gain(make_hard(attempts=2), 8, 1 / 8)
    assert found == pytest.approx(1 - 15 / 23 - 120 / 506, abs=1e-5)


def test_with_c1_0_one_right_response_is_a_promotion() -> None:
    assert expected_gain(make_hard(), 8, 0.0) == pytest.approx(1 - 9 / 17, abs=1e-4)


def test_a_flat_prior_makes_every_number_of_right_responses_equally_likely() -> None:
    assert [beta_binomial(k, 4, 1, 1) for k in range(5)] == pytest.approx([0.2] * 5)


def test_those_that_were_nearly_promoted_are_asked_before_those_that_failed_often() -> None:
    bad = [
        make_hard(prompt_id="tired", attempts=3), make_hard(prompt_id="near", mu=1 / 8),
        make_hard(prompt_id="new"), make_hard(prompt_id="once", attempts=1),
    ]  # fmt: skip
    pick = lambda most: most_promising(bad, most, group_size=8, c1=1 / 8, rng=random.Random(0))  # noqa: E731
    assert [pick(1), pick(2), pick(3)] == [["near"], ["near", "new"], ["near", "new", "once"]]
    assert pick(9) == ["tired", "near", "new", "once"]


def test_equal_prompts_are_drawn_from_uniformly() -> None:
    bad = [make_hard(prompt_id=name) for name in "abcd"]
    drawn = [most_promising(bad, 1, group_size=8, c1=1 / 8, rng=random.Random(seed))[0] for seed in range(400)]
    assert all(70 <= drawn.count(name) <= 130 for name in "abcd")  # 100 expected, sigma 8.7


@pytest.mark.parametrize(
    ("most", "paid", "asked"),
    [
        (10, SamplingCost(), 8),  # nothing seen: q = 1/5, f = 1/2, share 2 q / f = 4/5
        (32, SamplingCost(reevaluated=30, improved=2, fresh=160, informative=100), 8),  # 2 * (3/35) / (101/162) = .275
        (32, SamplingCost(reevaluated=30, improved=20, fresh=160, informative=100), 32),  # more than they cost
        (
            32,
            SamplingCost(reevaluated=500, improved=0, fresh=160, informative=159),
            1,
        ),  # never none: q must be measured
        (0, SamplingCost(), 0),
    ],
)
def test_a_round_asks_the_fewer_the_less_promotions_pay_beside_fresh_groups(
    most: int, paid: SamplingCost, asked: int
) -> None:
    assert budget(most, 2.0, paid) == asked


def test_what_sampling_paid_is_that_of_twenty_steps_before_and_of_none_since() -> None:
    lines = [{"step": t, "fresh": 32, "x1": 20, "reevaluated": 10, "improved": 1} for t in range(1, 31)]
    assert cost_before(25, lines) == SamplingCost(reevaluated=200, improved=20, fresh=640, informative=400)
    assert cost_before(3, lines) == SamplingCost(reevaluated=20, improved=2, fresh=64, informative=40)


def test_the_composer_asks_by_gain_and_within_the_budget() -> None:
    bad = [make_hard(prompt_id=f"{i}", birth=1, mu=(i % 2) / 8) for i in range(10)]
    rng = lambda purpose: rng_for(0, 5, purpose)  # noqa: E731
    assert Bapo(GAIN).hard_prompts_to_ask(bad, 5, frozenset({"1"}), rng) == ("3", "5", "7", "9")
    paying = GAIN.model_copy(update={"hard_prompt_value": 2.0})
    # 4 prompts at most, of which 2 * (1/5) / (1/2) = 4/5 before anything is known, and .275 behind a poor round.
    assert len(Bapo(paying).hard_prompts_to_ask(bad, 5, frozenset(), rng)) == 3
    poor = SamplingCost(reevaluated=30, improved=2, fresh=160, informative=100)
    assert len(Bapo(paying).hard_prompts_to_ask(bad, 5, frozenset(), rng, poor)) == 1
