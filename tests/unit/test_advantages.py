"""Group advantages of eq. 2: vectors V1."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo.algorithms.advantages import AdvantageNorm, group_advantages

NORMS = get_args(AdvantageNorm)

V1 = [
    # k, norm, eps, A of a right response, A of a wrong one; G = 8
    (1, "pop_var", 1e-6, 2.645739, -0.377963),
    (2, "pop_var", 1e-6, 1.732046, -0.577349),
    (4, "pop_var", 1e-6, 0.999998, -0.999998),
    (1, "std_ddof1", 1e-6, 2.474867, -0.353552),
    (2, "std_ddof1", 1e-6, 1.620182, -0.540061),
    (4, "std_ddof1", 1e-6, 0.935413, -0.935413),
    (1, "std_ddof1", 1e-4, 2.474174, -0.353453),
    (2, "std_ddof1", 1e-4, 1.619835, -0.539945),
    (4, "std_ddof1", 1e-4, 0.935239, -0.935239),
    (1, "center", 0.0, 0.875, -0.125),
    (2, "center", 0.0, 0.75, -0.25),
    (4, "center", 0.0, 0.5, -0.5),
]


@pytest.mark.parametrize(("k", "norm", "eps", "right", "wrong"), V1)
def test_advantages_are_those_of_the_vectors(
    k: int, norm: AdvantageNorm, eps: float, right: float, wrong: float
) -> None:
    rewards = [0.0] * (8 - k) + [1.0] * k
    assert group_advantages(rewards, norm, eps) == pytest.approx([wrong] * (8 - k) + [right] * k, abs=1e-6)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_equal_rewards_have_no_advantage_even_without_smoothing(norm: AdvantageNorm, reward: float) -> None:
    assert group_advantages([reward] * 7, norm, 0.0).tolist() == [0.0] * 7


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


@pytest.mark.parametrize("rewards", [[], [1.0], [[0.0, 1.0]]])
def test_one_response_is_not_a_group(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="G >= 2"):
        group_advantages(rewards, "pop_var", 1e-6)
