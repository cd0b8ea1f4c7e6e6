"""Shaped rewards, value baselines and coefficients that change with the step: vectors V14, V15, V19."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo.config.load import load_config
from bapo.core.types import BatchEntry, Origin
from learner.advantages.formulas import gae, length_reward, overlong_penalty, whitened
from learner.advantages.of_batch import row_advantages, shaped_rewards
from learner.update.reference import reference_share
from tests.support.factories import make_batch, make_group
from tests.support.learner import learner_config
from tests.support.vectors import vector


def test_v14_the_last_tokens_before_the_limit_cost_up_to_1() -> None:
    given = vector("V14.overlong")
    assert overlong_penalty(given["n"], 20480, 4096).tolist() == given["reward"]


def test_v19_short_right_responses_gain_and_long_ones_lose() -> None:
    given = vector("V19.kimi")
    assert length_reward(given["r"], given["len"]).tolist() == given["len_reward"]


def test_with_kimis_weight_the_longest_right_response_stays_above_the_shortest_wrong_one() -> None:
    config = load_config(["kimi"], [])
    given = entry(rewards="1100", lengths=[2, 10, 2, 10])
    during, after = (shaped_rewards(given, step, config).tolist() for step in (157, 158))
    assert during == [1.0, 1.0, 0.0, 0.0]
    assert after == [1.25, 0.75, 0.0, -0.25]


def test_v19_the_share_of_the_base_model_falls_in_stages() -> None:
    given = vector("V19.remix_lambda")
    assert [reference_share(step) for step in given["t"]] == pytest.approx(given["lam"])


@pytest.mark.parametrize(("gae_lambda", "key"), [(1.0, "lam1"), (0.95, "lam0_95")])
def test_v15_advantages_against_a_value_function(gae_lambda: float, key: str) -> None:
    given = vector("V15.gae")
    want, values = given[key], given["values"]
    advantages, returns = gae(given["rewards"], values, gamma=1.0, gae_lambda=gae_lambda)
    assert advantages.tolist() == pytest.approx(want, abs=1e-6)
    assert returns.tolist() == pytest.approx([a + v for a, v in zip(want, values, strict=True)], abs=1e-6)
    if gae_lambda == 1.0:
        assert returns.tolist() == pytest.approx(given["returns_lam1"])


def test_v15_whitened_with_the_sample_variance() -> None:
    given = vector("V15.gae")
    assert whitened(given["lam1"]).tolist() == pytest.approx(given["whitened_ddof1"], abs=1e-6)
    assert whitened([3.0]).tolist() == [0.0]
    assert whitened([]).tolist() == []
    # Mean 5e-4, sample variance 5e-7: 5e-4 / sqrt(5e-7 + 1e-8) = .70014
    assert whitened([0.0, 1e-3]).tolist() == pytest.approx([-0.70014, 0.70014], abs=1e-5)


@given(values=st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=12), reward=st.floats(0, 1, width=32))
def test_without_discount_the_advantage_is_the_reward_less_the_value(values: list[float], reward: float) -> None:
    rewards = [0.0] * (len(values) - 1) + [reward]
    advantages, returns = gae(rewards, values, gamma=1.0, gae_lambda=1.0)
    assert advantages.tolist() == pytest.approx([reward - value for value in values], abs=1e-9)
    assert returns.tolist() == pytest.approx([reward] * len(values), abs=1e-9)


def test_responses_one_after_the_other_know_nothing_of_each_other() -> None:
    rewards, values, lengths = [0, 1, 0, 0, 0.5, 1], [0.2, 0.4, 0.5, 0.7, 0.1, 0.9], [2, 3, 1]
    found = gae(rewards, values, gamma=0.9, gae_lambda=0.8, lengths=lengths)
    parts = [gae(rewards[a:b], values[a:b], gamma=0.9, gae_lambda=0.8) for a, b in ((0, 2), (2, 5), (5, 6))]
    for together, apart in zip(found, zip(*parts, strict=True), strict=True):
        assert together.tolist() == pytest.approx(np.concatenate(apart).tolist())
    # By hand: delta of the last token 0.6, so the one before has 0 + 0.9 * 0.4 - 0.2 + 0.72 * 0.6.
    assert found[0][:2].tolist() == pytest.approx([0.592, 0.6])


def entry(*, origin: Origin = Origin.X1, **fields: object) -> BatchEntry:
    return BatchEntry(origin=origin, group=make_group(**fields))  # type: ignore[arg-type]


def test_penalties_and_bonuses_add_up_and_the_stored_rewards_stay() -> None:
    config = learner_config(
        rollout={"max_response_tokens": 24},
        shaping={"overlong_cache": 8, "overlong_factor": 0.5, "length_weight": 2.0, "length_warmup_steps": 3},
    )
    given = entry(rewards="110", lengths=[24, 20, 4])
    # Overlong: -1, -1/2, 0 times 1/2. Length reward: -1/2, 0.5 - 16/20, and 0 for a short wrong one.
    assert shaped_rewards(given, 3, config).tolist() == pytest.approx([0.5, 0.75, 0.0])
    assert shaped_rewards(given, 4, config).tolist() == pytest.approx([0.5 - 1.0, 0.75 - 0.6, 0.0])
    assert given.group.rewards.tolist() == [1.0, 1.0, 0.0]


def test_a_penalty_gives_an_all_wrong_group_a_direction() -> None:
    config = learner_config(rollout={"max_response_tokens": 24}, shaping={"overlong_cache": 8})
    batch = make_batch(groups=[make_group(rewards="0000", lengths=[24, 2, 2, 2])])
    found = row_advantages(batch, config)
    assert found[0] < 0 < found[1]


def test_batch_norm_leaves_out_what_the_loss_leaves_out() -> None:
    config = learner_config(
        loss={"advantage_batch_norm": True, "advantage_norm": "center"}, shaping={"overlong_filter": True}
    )
    groups = [
        make_group(rewards="1100", prompt_id="a", lengths=[1, 1, 1, 1], truncated=[0]),
        make_group(rewards="0000", prompt_id="b", lengths=[2, 2, 2, 2]),
    ]
    found = row_advantages(make_batch(groups=groups), config)
    seen = np.array([0.5, -0.5, -0.5, *[0.0] * 8])
    assert found[1] == pytest.approx((0.5 - seen.mean()) / seen.std(ddof=1), abs=1e-3)
    assert found[0] == 0.5, "a truncated response is in no statistic; its own number is used by nobody"


def test_a_wrong_response_never_gains_by_being_short() -> None:
    assert length_reward([0, 1], [1, 9]).tolist() == [0.0, -0.5]
    assert length_reward([1, 0, 1], [5, 5, 5]).tolist() == [0, 0, 0], "all equally long"


def test_areals_scale_moves_rewards_before_the_advantage() -> None:
    config = learner_config(shaping={"shift": -0.5, "scale": 10.0})
    assert shaped_rewards(entry(rewards="10"), 1, config).tolist() == [5.0, -5.0]
