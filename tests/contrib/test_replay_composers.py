"""Composers that train fresh groups with stored ones: hand-checked steps of each, and the vectors of RePO."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from bapo.algorithms.composer import Reason
from bapo.config.load import load_config
from bapo.core.errors import ConfigError
from bapo.core.types import GroupStat
from contrib.replay_memory import newest, once_per_prompt, with_fresh
from contrib.repo.composer import STRATEGIES, Stored
from learner.advantages.formulas import group_advantages
from tests.support.composers import composer, decided, group, names
from tests.support.factories import make_stat
from tests.support.vectors import vector

FAILED, MIXED = "0000", "1000"

# -- RePO


V18 = vector("V18.repo")["buf"]
"""Rewards of a prompt's sixteen stored responses, oldest first."""


def picked(strategy: str, k: int = 8, rewards: Sequence[float] = V18) -> list[int]:
    stored = [Stored((0, row), float(reward)) for row, reward in enumerate(rewards)]
    return [response.row[1] for response in STRATEGIES[strategy](stored, k, random.Random(0))]


def test_v18_the_highest_eight_are_the_right_ones_and_then_the_oldest() -> None:
    rows, want = picked("highest_k"), vector("V18.repo")
    assert rows == want["highest_k"]
    advantages = group_advantages([V18[row] for row in rows], "std_ddof1", 1e-4)
    assert advantages.tolist() == pytest.approx(np.repeat(want["adv_off_highest"], 4), abs=1e-6)


def test_v18_the_recent_eight_are_the_newest_in_their_order() -> None:
    rows, want = picked("recent_k"), vector("V18.repo")
    assert rows == want["recent_k"]
    advantages = group_advantages([V18[row] for row in rows], "std_ddof1", 1e-4)
    assert advantages.tolist() == pytest.approx(want["adv_off_recent"], abs=1e-6)


def test_v18_the_largest_variance_of_eight_is_a_quarter() -> None:
    rewards = [V18[row] for row in picked("max_variance_k")]
    assert sum(rewards) == 4  # mean 1/2: the largest variance there is
    assert np.var(rewards) == vector("V18.repo")["max_var_value"]


def test_among_choices_of_the_same_variance_the_larger_sum_is_taken() -> None:
    assert sum(V18[row] for row in picked("max_variance_k", k=3)) == 2  # 1, 1, 0 and 1, 0, 0 have the same variance
    assert sorted(picked("max_variance_k", k=2, rewards=[0.5, 1.0, 0.0, 0.4])) == [1, 2]


def test_the_other_strategies_take_all_or_some() -> None:
    assert picked("all") == list(range(16))
    drawn = picked("random_k", k=5)
    assert (len(set(drawn)), drawn) == (5, sorted(drawn))


def test_a_prompts_replay_begins_at_its_third_visit_with_rows_of_its_two_last_groups() -> None:
    rule = composer("repo", options={"per_prompt": 8, "num_rows": 4})
    first = decided(rule, [group("a1", "1000"), group("b1", "0000")], step=1)
    assert [item.item_id for item in first.items] == ["a1", "b1"]
    second = decided(rule, [group("a2", "0110")], first.high, step=2)
    assert [item.item_id for item in second.items] == ["a2"], "eight stored responses are needed, four are there"
    third = decided(rule, [group("a3", "0000")], second.high, step=3)
    # Right: a1 row 0, a2 rows 1 and 2; then the oldest wrong one, a1 row 1.
    assert [item.item_id for item in third.items] == ["a3+a1:0,1+a2:1,2"]
    assert third.reasons == {"a3": Reason.INFORMATIVE, "a1": Reason.REPLAYED, "a2": Reason.REPLAYED}
    assert names(third.high) == ["b1", "a2", "a3"], "a1 is not among the last eight responses any more"
    assert [stat.birth for stat in third.high] == [1, 2, 3]


@pytest.mark.parametrize("name", ["repo", "arpo"])
def test_what_a_prompt_has_stored_is_kept_however_many_prompts_there_are(name: str) -> None:
    stored = [make_stat(rewards=MIXED, prompt_id=f"p{i}", group_id=f"g{i}", birth=1) for i in range(600)]
    assert len(decided(composer(name), [group("a2", MIXED)], stored, step=2).high) == 601


@pytest.mark.parametrize("name", ["repo", "arpo"])
def test_anchors_by_group_are_refused_where_rows_of_several_are_joined(name: str) -> None:
    with pytest.raises(ConfigError, match=r"set loss\.ratio_mode = decoupled"):
        load_config([name], ["--loss.ratio_mode=official"])


# -- ReMix


def test_remix_draws_from_the_window_and_becomes_on_policy_after_t() -> None:
    rule = composer("remix", online_filter="none", options={"share": 0.5, "window": 2, "last_step": 4})
    high: tuple[GroupStat, ...] = ()
    drawn, sizes = [], []
    for step in range(1, 7):
        num = rule.fresh_schedule.at(step)
        decision = decided(rule, [group(f"{letter}{step}", MIXED) for letter in "abcd"[:num]], high, step=step)
        drawn.append(set(decision.x3))
        sizes.append((len(decision.x1), len(decision.x3)))
        high = decision.high
    assert sizes == [(2, 0), (2, 2), (2, 2), (2, 2), (4, 0), (4, 0)]
    assert drawn[1] == {"a1", "b1"}
    assert drawn[2] < {"a1", "b1", "a2", "b2"}
    assert drawn[3] < {"a2", "b2", "a3", "b3"}, "step 1 has left the window of two steps"
    assert high == ()


@pytest.mark.parametrize(("last_step", "num_steps", "want"), [(100, 350, 0.079e6), (50, 100, 0.020e6)])
def test_remix_samples_as_many_groups_as_the_paper_counts(last_step: int, num_steps: int, want: float) -> None:
    rule = composer("remix", batch_size=256, options={"share": 0.4, "last_step": last_step})
    assert rule.fresh_schedule.up_to(num_steps) == pytest.approx(want, rel=0.03)


# -- what they share


def test_a_memory_keeps_the_newest_group_of_each_prompt_first_in_first_out() -> None:
    memory = with_fresh(
        [group(name, MIXED) for name in ("a1", "b1", "c1")], [group("a2", MIXED), group("e2", MIXED)], 2
    )
    assert names(once_per_prompt(memory)) == ["b1", "c1", "a2", "e2"]
    assert names(newest(once_per_prompt(memory), 3)) == ["c1", "a2", "e2"]


# -- ARPO


def test_a_group_that_fails_as_a_whole_gets_a_stored_success_in_place_of_its_first_response() -> None:
    rule = composer("arpo", options={"per_prompt": 2})
    first = decided(rule, [group("a1", "0010"), group("b1", FAILED)], step=1)
    assert [item.item_id for item in first.items] == ["a1", "b1"]
    assert names(first.high) == ["a1"], "b1 has no success"
    second = decided(rule, [group("a2", FAILED), group("b2", FAILED)], first.high, step=2)
    assert [item.item_id for item in second.items] == ["a1:2+a2:1,2,3", "b2"]
    assert second.reasons["a1"] == Reason.REPLAYED
    third = decided(rule, [group("a3", "1100")], second.high, step=3)
    assert [item.item_id for item in third.items] == ["a3"], "it has successes of its own"
    assert names(third.high) == ["a3"], "the last two successes are both its own"


@pytest.mark.parametrize(
    ("rewards", "fails"), [([0, 0, 0, 0], True), ([0.1] * 4, True), ([0.2] * 4, False), ([0.1, 0.1, 0.1, 0.3], False)]
)
def test_failing_as_a_whole_is_a_low_mean_without_differences(rewards: list[float], fails: bool) -> None:
    past = group("p1", "0010", birth=1)
    fresh = make_stat(rewards=rewards, prompt_id="p", group_id="p2")
    decision = decided(composer("arpo"), [fresh], [past])
    assert (decision.items[0].item_id != "p2") is fails


# -- LUFFY and ReLIFT


def expert_group(name: str, rewards: str, **rows: Any) -> GroupStat:
    """Three sampled responses and an expert's."""
    return group(name, rewards + "1", experts=[3], **rows)


def test_luffy_trains_sampled_and_expert_rows_under_one_baseline_and_r_tot_is_of_the_sampled_ones() -> None:
    decision = decided(composer("luffy", num_experts=1), [expert_group("a", "000"), expert_group("b", "110")])
    assert [item.item_id for item in decision.items] == ["a", "b"]
    assert decision.r_tot == pytest.approx(2 / 6)


def test_relift_trains_sampled_rows_and_collects_prompts_that_are_out_of_reach() -> None:
    rule = composer("relift", num_experts=1, online_filter="none", options={"sft_items": 2})
    first = decided(rule, [expert_group("a1", "000"), expert_group("b1", "000", truncated=[1])], step=1)
    assert [(item.item_id, item.kind) for item in first.items] == [("a1:0,1,2", "rl"), ("b1:0,1,2", "rl")]
    assert names(first.high) == ["a1"], "a truncated response is not well formatted"
    second = decided(rule, [expert_group("c2", "000"), expert_group("d2", "000")], first.high, step=2)
    assert [(item.item_id, item.kind) for item in second.items] == [
        ("c2:0,1,2", "rl"), ("d2:0,1,2", "rl"), ("c2:3", "sft"), ("d2:3", "sft"),
    ]  # fmt: skip
    assert names(second.high) == ["a1"], "the newest two were taken, the older one waits"
    assert {key for key, reason in second.reasons.items() if reason == Reason.SUPERVISED} == {"c2", "d2"}


def test_relift_refuses_supervised_steps_that_no_batch_or_queue_can_hold() -> None:
    with pytest.raises(ConfigError, match="sft_items = 500 is more than algorithm"):
        load_config(["relift"], ["--algorithm.options.sft_items=500"])
    small = ["--algorithm.options.capacity=64"]
    with pytest.raises(ConfigError, match="capacity = 64 is less than the 128"):
        load_config(["relift"], small)
    assert load_config(["relift"], [*small, "--algorithm.options.sft_items=64"])


# -- the fresh groups of each step


def test_the_schedule_of_fresh_groups_counts_and_places_them() -> None:
    schedule = composer("remix", options={"share": 0.5, "first_step": 3, "last_step": 5}).fresh_schedule
    assert [schedule.at(step) for step in range(1, 8)] == [4, 4, 2, 2, 2, 4, 4]
    assert [schedule.up_to(step) for step in range(8)] == [0, 4, 8, 10, 12, 14, 18, 22]
    places = [schedule.step_of(place) for place in range(20)]
    assert places == [1] * 4 + [2] * 4 + [3] * 2 + [4] * 2 + [5] * 2 + [6] * 4 + [7] * 2
