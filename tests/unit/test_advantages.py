"""Group advantages of eq. 2 (vectors V1), and how token losses become one number."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo.config.objective import Aggregation
from learner.advantages.formulas import (
    AdvantageNorm,
    AdvantagePool,
    batch_normalised,
    group_advantages,
    pass_k_weights,
    pooled_advantages,
)
from learner.losses.objective import token_weights
from tests.support.vectors import vector

NORMS = get_args(AdvantageNorm)


@pytest.mark.parametrize("name", ["V1.k1", "V1.k2", "V1.k4", "V1.k8"])
@pytest.mark.parametrize(
    ("norm", "eps", "key"),
    [
        ("pop_var", 1e-6, "paper_eps1e_6"),
        ("std_ddof1", 1e-6, "verl_ddof1_eps1e_6"),
        ("std_ddof1", 1e-4, "trl_ddof1_eps1e_4"),
        ("center", 0.0, "drgrpo"),
    ],
)
def test_advantages_are_those_of_the_vectors(name: str, norm: AdvantageNorm, eps: float, key: str) -> None:
    given = vector(name)
    right, wrong = given[key]
    assert np.mean(given["r"]) == given["mu"]
    want = [right if reward else wrong for reward in given["r"]]
    assert group_advantages(given["r"], norm, eps) == pytest.approx(want, abs=1e-6)


@given(
    rewards=st.lists(st.floats(0, 1, width=32), min_size=2, max_size=16),
    norm=st.sampled_from(NORMS),
)
def test_advantages_of_a_group_sum_to_0(rewards: list[float], norm: AdvantageNorm) -> None:
    advantages = group_advantages(rewards, norm, 1e-6)
    assert abs(advantages.sum()) <= 1e-9 * max(1.0, np.abs(advantages).max())


@given(rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=16), norm=st.sampled_from(NORMS))
def test_the_better_response_never_has_the_smaller_advantage(rewards: list[float], norm: AdvantageNorm) -> None:
    advantages = group_advantages(rewards, norm, 1e-6)
    right, wrong = advantages[np.array(rewards) == 1], advantages[np.array(rewards) == 0]
    assert not len(right) or not len(wrong) or right.min() > 0 > wrong.max()


def test_float32_rewards_of_a_group_give_float64_advantages() -> None:
    assert group_advantages(np.array([0, 1], dtype=np.float32), "center", 0.0).dtype == np.float64


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("reward", [0.0, 0.5, 1.0])
def test_a_single_response_has_its_reward_as_advantage(norm: AdvantageNorm, reward: float) -> None:
    assert group_advantages([reward], norm, 1e-6).tolist() == pytest.approx([reward], abs=1e-5)


FRESH = np.array([True] * 7 + [False])


def test_v17_an_experts_trace_shares_the_mean_of_its_mixed_group() -> None:
    # 2 of 7 sampled responses are right, and so is the expert's: the mean is 3/8.
    [given] = vector("V17.luffy", "adv_n8")
    right, wrong = given["A_pos"], given["A_neg"]
    assert (given["on_k"], given["off"]) == (2, 1)
    advantages = pooled_advantages([1, 1, 0, 0, 0, 0, 0, 1], FRESH, "mixed", "center", 0.0)
    assert advantages.tolist() == pytest.approx([right, right, *[wrong] * 5, right])


def test_against_the_sampled_responses_alone_the_expert_stands_higher() -> None:
    advantages = pooled_advantages([1, 1, 0, 0, 0, 0, 0, 1], FRESH, "on_policy", "center", 0.0)
    assert advantages.tolist() == pytest.approx([5 / 7, 5 / 7, *[-2 / 7] * 5, 5 / 7])


def test_v18_replayed_rows_are_normalised_among_themselves() -> None:
    # RePO: 8 fresh, 8 replayed. Half of the replayed ones are right, and one in eight of the fresh ones.
    fresh = np.array([True] * 8 + [False] * 8)
    rewards = [0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]
    advantages = pooled_advantages(rewards, fresh, "split", "std_ddof1", 1e-4)
    assert advantages[:8].tolist() == pytest.approx([-0.353453] * 2 + [2.474174] + [-0.353453] * 5, abs=1e-6)
    assert advantages[8:].tolist() == pytest.approx([0.935239] * 4 + [-0.935239] * 4, abs=1e-6)


@pytest.mark.parametrize("pool", get_args(AdvantagePool))
@pytest.mark.parametrize("fresh", [[True] * 4, [False] * 4])
def test_rows_of_one_kind_are_one_pool(pool: AdvantagePool, fresh: list[bool]) -> None:
    advantages = pooled_advantages([1, 0, 0, 0], np.array(fresh), pool, "pop_var", 1e-6)
    assert advantages.tolist() == group_advantages([1, 0, 0, 0], "pop_var", 1e-6).tolist()


@given(
    rewards=st.lists(st.floats(0, 1, width=32), min_size=4, max_size=16),
    pool=st.sampled_from(["mixed", "split"]),
    norm=st.sampled_from(NORMS),
    num_fresh=st.integers(2, 14),
)
def test_pooled_advantages_sum_to_0(
    rewards: list[float], pool: AdvantagePool, norm: AdvantageNorm, num_fresh: int
) -> None:
    fresh = np.arange(len(rewards)) < min(num_fresh, len(rewards) - 2)
    advantages = pooled_advantages(rewards, fresh, pool, norm, 1e-6)
    assert abs(advantages.sum()) <= 1e-9 * max(1.0, np.abs(advantages).max())


def test_areals_batch_norm_by_hand() -> None:
    # Two tokens of +1 and six of -1: mean -1/2, squares 2 * 2.25 + 6 * 0.25 = 6 over 7.
    deviation = np.sqrt(6 / 7)
    found = batch_normalised([1.0, -1.0, -1.0], [2, 1, 5])
    assert found.tolist() == pytest.approx([1.5 / deviation, -0.5 / deviation, -0.5 / deviation], abs=1e-4)
    assert batch_normalised([0.5, 0.5], [3, 4]).tolist() == [0.0, 0.0]
    assert batch_normalised([], []).tolist() == []


@given(data=st.lists(st.tuples(st.floats(-3, 3, width=32), st.integers(1, 50)), min_size=2, max_size=20))
def test_batch_normalised_advantages_sum_to_0_over_tokens(data: list[tuple[float, int]]) -> None:
    advantages, lengths = [a for a, _ in data], [n for _, n in data]
    found = batch_normalised(advantages, lengths)
    assert abs(float(found @ np.array(lengths))) <= 1e-6 * max(1.0, float(np.abs(found) @ np.array(lengths)))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_equal_rewards_have_no_advantage_even_without_smoothing(norm: AdvantageNorm, reward: float) -> None:
    assert group_advantages([reward] * 7, norm, 0.0).tolist() == [0.0] * 7


@pytest.mark.parametrize("rewards", [[], [[0.0, 1.0]]])
def test_no_response_is_no_group(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="G >= 1"):
        group_advantages(rewards, "pop_var", 1e-6)


# -- aggregations


@pytest.mark.parametrize(
    ("aggregation", "want"),
    [
        # Group 0 has two fresh rows of 3 and 2 tokens and one replayed of 4; group 1 has one fresh row of 5.
        ("two_term", [1 / (2 * 2 * 3), 1 / (2 * 2 * 2), 1 / (2 * 1 * 4), 1 / (2 * 1 * 5)]),
        ("group_const_len", [1 / (2 * 10)] * 4),
    ],
)
def test_aggregations_by_group(aggregation: str, want: list[float]) -> None:
    weights = token_weights(
        np.array([3, 2, 4, 5]),
        aggregation,  # type: ignore[arg-type]
        10,
        group_R=np.array([0, 0, 0, 1]),
        replayed_R=np.array([False, False, True, False]),
    )
    assert weights.tolist() == pytest.approx(want)


@given(data=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans()), min_size=1, max_size=20))
def test_the_weights_of_a_minibatch_add_up_to_a_mean(data: list[tuple[int, int, bool]]) -> None:
    lengths, groups, replayed = (np.array(column) for column in zip(*data, strict=True))
    kept = lengths > 0
    kinds = {(group, old) for length, group, old in data if length}
    want = {
        "token_mean": 1.0,
        "seq_mean_token_mean": 1.0,
        "seq_mean_token_sum": lengths.sum() / max(1, kept.sum()),
        "const_len": lengths.sum() / (max(1, kept.sum()) * 10),
        "group_const_len": lengths.sum() / (max(1, len(set(groups[kept]))) * 10),
        # One mean over fresh and one over replayed rows for each group that has them.
        "two_term": len(kinds) / max(1, len(set(groups[kept]))),
    }
    for aggregation in get_args(Aggregation):
        weights = token_weights(lengths, aggregation, 10, group_R=groups, replayed_R=replayed)
        assert float(weights @ lengths) == pytest.approx(want[aggregation] if kept.any() else 0.0), aggregation


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "const_len"])
def test_a_response_that_is_left_out_whole_has_no_weight_and_is_not_counted(aggregation: str) -> None:
    weights = token_weights(np.array([3, 0, 2]), aggregation, 4)  # type: ignore[arg-type]
    without = token_weights(np.array([3, 2]), aggregation, 4)  # type: ignore[arg-type]
    assert weights.tolist() == [without[0], 0.0, without[1]]
    assert token_weights(np.array([0, 0]), aggregation, 4).tolist() == [0.0, 0.0]  # type: ignore[arg-type]


def test_for_pass_at_k_a_success_counts_as_far_as_the_others_fail() -> None:
    # One of four is correct: the others of the success are all wrong, those of a failure have 1/3.
    assert pass_k_weights([1.0, 0.0, 0.0, 0.0], 2).tolist() == pytest.approx([2, 4 / 3, 4 / 3, 4 / 3])
    # Of the three others two must fail, K C(w, 2) / C(3, 2): a success has w = 2, a failure w = 1.
    assert pass_k_weights([1.0, 1.0, 0.0, 0.0], 3).tolist() == [1, 1, 0, 0]
    assert pass_k_weights([1.0, 0.0], 1).tolist() == [1, 1]
    assert pass_k_weights([0.0, 1.0], 4).tolist() == [0, 2]  # K is at most G = 2
