"""Rewards between 0 and 1: a group trains when its rewards differ, and counts of correct responses count rewards of 1.

For rewards in {0, 1} every rule is the paper's; that is tried on all groups of up to ten responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random

import numpy as np
import pytest

from bapo.algorithms.composer import Reason
from bapo.algorithms.filters import filtered_fresh, online_filter
from bapo.algorithms.reward_levels import is_all_correct, is_all_incorrect, is_informative
from bapo.algorithms.settings import AlgorithmConfig
from bapo.core.types import GroupStat, num_correct
from bapo.runtime.metrics.server import Telemetry
from learner.advantages.formulas import group_advantages
from learner.diagnostics.gauges import PromptsSeen
from tests.support.composers import composer, decided, names
from tests.support.factories import make_hard, make_result, make_stat
from tests.unit.test_composer import compose, prompts

RANGE = AlgorithmConfig(online_filter="range")
FLOAT32_TENTH = float(np.float32(0.1))


def reason_of(rewards: Sequence[float]) -> str:
    _, reasons = filtered_fresh(RANGE, (make_stat(rewards=rewards),), Random(0))
    return reasons["g-p"]


# -- the rule


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([0, 0.1, 0.1, 0.1], Reason.INFORMATIVE),  # sum .3, below 1
        ([0.1, 0.1, 0.1, 1], Reason.INFORMATIVE),
        ([0.1, 1, 1, 1], Reason.INFORMATIVE),  # sum 3.1, above G - 1
        ([0.999, 1, 1, 1], Reason.INFORMATIVE),
        ([0, 0, 0, 0.001], Reason.INFORMATIVE),
        ([0.5, 0.5, 0.5, 0.4], Reason.INFORMATIVE),
        ([0, 0, 0, 0], Reason.ALL_INCORRECT),
        ([1, 1, 1, 1], Reason.ALL_CORRECT),
        ([0.1, 0.1, 0.1, 0.1], Reason.NO_VARIANCE),  # sum .4: every response is well-formed, none is better
        ([0.9, 0.9, 0.9, 0.9], Reason.NO_VARIANCE),  # sum 3.6
        ([0.5, 0.5], Reason.NO_VARIANCE),
        ([0.3], Reason.NO_VARIANCE),
    ],
)
def test_a_group_trains_when_its_rewards_differ(rewards: list[float], reason: str) -> None:
    assert reason_of(rewards) == reason


@pytest.mark.parametrize("size", range(1, 11))
def test_for_binary_rewards_the_rule_is_eq_5(size: int) -> None:
    for rewards in product([0.0, 1.0], repeat=size):
        stat, k = make_stat(rewards=rewards), rewards.count(1.0)
        assert is_informative(stat) == (1 <= k <= size - 1)
        assert is_all_incorrect(stat) == (k == 0)
        assert is_all_correct(stat) == (k == size)


def test_rounding_is_no_difference() -> None:
    sums = [0.1 + 0.2, 0.3, float(np.float32(0.3)), float(np.float32(0.1) + np.float32(0.2)), 0.3 - 1e-7]
    assert reason_of(sums) == Reason.NO_VARIANCE
    assert reason_of([1 - 6e-8, 1, 1, 1]) == Reason.ALL_CORRECT
    assert reason_of([0, 1e-7, 0, 0]) == Reason.ALL_INCORRECT
    assert reason_of([0.3, 0.3001, 0.3, 0.3]) == Reason.INFORMATIVE


@pytest.mark.parametrize("norm", ["pop_var", "std_ddof1", "center"])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_rounding_gives_no_advantage(norm: str, eps: float) -> None:
    rewards = [0.3, 0.3 + 3e-8, 0.3, 0.3 - 3e-8]
    assert group_advantages(rewards, norm, eps).tolist() == [0, 0, 0, 0]  # type: ignore[arg-type]


def test_an_expert_s_reward_makes_no_sampled_response_better() -> None:
    stat = make_stat(rewards=[0.1, 0.1, 0.1, 1.0], experts=[3])
    assert not is_informative(stat)
    assert is_informative(make_stat(rewards=[0.1, 0.0, 0.1, 1.0], experts=[3]))


# -- counts of correct responses


def test_correct_is_a_reward_of_1_and_partial_credit_adds_up_to_none() -> None:
    assert num_correct([0.1] * 8) == 0  # a sum of .8 is not one correct response
    assert num_correct([0.9, 0.9, 1, 0]) == 1
    assert num_correct([1 - 6e-8, 1, 0.5]) == 2


def test_a_prompt_is_newly_solved_by_a_correct_response_and_not_by_partial_credit() -> None:
    telemetry = Telemetry()
    seen = PromptsSeen(telemetry)

    def has_unsolved_after(*rewards: float) -> bool:
        seen.count([make_result(rewards=rewards)])
        return "bapo_prompts_unsolved 1.0" in telemetry.exposition().decode()

    assert has_unsolved_after(0.1, 0.1, 0.1, 0.1)
    assert has_unsolved_after(0.9, 0.9, 0.9, 0.9)
    assert not has_unsolved_after(0, 0, 0.1, 1)


# -- filters


def test_the_gaussian_weighs_a_group_by_its_mean() -> None:
    settings = AlgorithmConfig(online_filter="gaussian", gaussian_center=0.075, gaussian_width=0.001)
    fresh = [make_stat(rewards=[0, 0.1, 0.1, 0.1], prompt_id="a"), make_stat(rewards=[0, 0, 0, 1], prompt_id="b")]
    assert [stat.prompt_id for stat in online_filter(settings, fresh, Random(0))] == ["a"]


# -- the composer `bapo`: c1, c2 and c3 compare the mean as it stands


def group(*rewards: float, prompt_id: str = "p", kind: str = "f", birth: int = 0) -> GroupStat:
    return make_stat(rewards=rewards, prompt_id=prompt_id, group_id=f"{kind}-{prompt_id}", birth=birth)


@pytest.mark.parametrize(("c1", "is_in_bad"), [(0.0, ""), (1 / 8, "p"), (0.074, ""), (0.075, "p")])
def test_a_hard_prompt_may_train_too(c1: float, is_in_bad: str) -> None:
    """As k = 1 of 8 does with c1 = 1/8. The mean of 0, .1, .1, .1 is .075."""
    decision = compose(AlgorithmConfig(batch_size=6, c1=c1), fresh=[group(0, 0.1, 0.1, 0.1)])
    assert (decision.x1, prompts(decision.bad)) == (("f-p",), is_in_bad)


@pytest.mark.parametrize(
    ("rewards", "reason", "is_left"),
    [
        ([0, 0.1, 0.1, 0.1], Reason.STILL_HARD, True),  # mean .075 <= c1 = 1/8
        ([0.1, 0.1, 0.1, 0.1], Reason.STILL_HARD, True),
        ([0.2, 0.2, 0.2, 0.2], Reason.NO_VARIANCE, True),
        ([0, 0.1, 0.1, 1], Reason.IMPROVED, False),
        ([0.9, 1, 1, 1], Reason.IMPROVED, False),  # not solved: three are better than the fourth
        ([1, 1, 1, 1], Reason.SOLVED, False),
    ],
)
def test_a_reevaluated_prompt_is_solved_when_every_reward_is_1(
    rewards: list[float], reason: str, is_left: bool
) -> None:
    again = group(*rewards, kind="r")
    decision = compose(fresh={"z": 8}, reevaluated=[again], bad=[make_hard(prompt_id="p")])
    assert decision.reasons["r-p"] == reason
    assert decision.x2 == (("r-p",) if reason == Reason.IMPROVED else ())
    assert prompts(decision.bad) == ("p" if is_left else "")


def test_the_window_of_b_high_compares_means() -> None:
    window = AlgorithmConfig(batch_size=6, threshold_schedule="fixed", c2_range=(0.25, 0.25), c3_range=(0.375, 0.375))
    fresh = [
        group(0, 0.1, 0.1, 1, prompt_id="a"),  # mean .3
        group(0.3, 0.3, 0.3, 0.3, prompt_id="b"),  # has no advantage: never drawn
        group(0, 0, 0.9, 0, prompt_id="c"),  # mean .225
    ]
    high = compose(window, fresh=fresh).high
    assert prompts(high) == "ab"
    assert compose(window, fresh={"z": 8}, high=high, step=5).x3 == ("f-a",)


@pytest.mark.parametrize(
    ("rewards", "is_taken"),
    [([0, 0.5, 0.5, 1], True), ([0.25, 0.75, 0.5, 0.5], True), ([0, 0.5, 0.5, 0.9], False), ([0.5] * 4, False)],
)
def test_the_mini_test_reuses_a_mean_of_one_half(rewards: list[float], is_taken: bool) -> None:
    mini = AlgorithmConfig(batch_size=4, c1=0.0, x3_exactly_half=True)
    high = compose(mini, fresh=[group(*rewards)]).high
    assert bool(compose(mini, fresh={"z": 8}, high=high, step=5).x3) is is_taken


def test_the_youngest_are_those_whose_rewards_differ() -> None:
    settings = AlgorithmConfig(batch_size=6, group_size=4, x3_policy="youngest", high_window=1)
    fresh = [
        group(0, 0.1, 0.1, 0.1, prompt_id="a"),
        group(0.1, 0.1, 0.1, 0.1, prompt_id="b"),
        group(0.1, 1, 1, 1, prompt_id="c"),
        group(0, 0.1, 1, 1, prompt_id="d"),
    ]
    high = compose(settings, fresh=fresh).high
    assert prompts(high) == "acd"
    reused = compose(settings, fresh=[group(1, 1, 1, 1, prompt_id="z")], high=high, step=5).x3
    assert reused == ("f-d", "f-c", "f-a")  # means .525, .775, .075: nearest to 1/2 first


# -- the other composers


def test_every_composer_leaves_out_the_same_groups() -> None:
    fresh = [
        make_stat(rewards=[0, 0.1, 0.1, 0.1], prompt_id="a", group_id="a"),
        make_stat(rewards=[0.1, 0.1, 0.1, 0.1], prompt_id="b", group_id="b"),
        make_stat(rewards=[0.1, 1, 1, 1], prompt_id="c", group_id="c"),
        make_stat(rewards=[1, 1, 1, 1], prompt_id="d", group_id="d"),
    ]
    for name in ("bapo", "grpo", "dapo", "remix"):
        decision = decided(composer(name, max_rounds=1, online_filter="range"), fresh)
        assert decision.x1 == ("a", "c"), name
        assert (decision.reasons["b"], decision.reasons["d"]) == (Reason.NO_VARIANCE, Reason.ALL_CORRECT), name


def test_arpo_stores_a_success_and_not_what_is_as_good_as_its_limit() -> None:
    """A reward of .1 arrives as float32, a little above .1."""
    rule = composer("arpo", options={"min_success": 0.1, "per_prompt": 8})
    fresh = [
        make_stat(rewards=[FLOAT32_TENTH, 0, 0, 0], prompt_id="a", group_id="a"),
        make_stat(rewards=[0.2, 0, 0, 0], prompt_id="b", group_id="b"),
    ]
    assert names(decided(rule, fresh).high) == ["b"]


@pytest.mark.parametrize(
    ("rewards", "is_queued"),
    [
        ([0, 0, 0], True),
        ([0.1, 0.1, 0.1], True),  # well-formed and wrong: no advantage either
        ([0, 0.1, 0.1], False),  # trains
        ([1, 1, 1], False),
        ([0, 0, 1], False),
    ],
)
def test_relift_asks_the_expert_where_nothing_can_be_reinforced(rewards: list[float], is_queued: bool) -> None:
    rule = composer("relift", num_experts=1, online_filter="range", options={"sft_items": 2})
    decision = decided(rule, [make_stat(rewards=[*rewards, 1.0], experts=[3])])
    assert bool(decision.high) is is_queued
    assert bool(decision.x1) is (len(set(rewards)) > 1)
