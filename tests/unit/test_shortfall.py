"""When batches are nearly empty, and what a user is advised to do: twenty rows at most, B = 32."""

from __future__ import annotations

from typing import Any

import pytest

from bapo.runtime.run_directory.shortfall import shortfall
from tests.support.run_rows import make_row


def rows(number: int, **fields: Any) -> list[dict[str, Any]]:
    return [make_row(step + 1, x2=0, **fields) for step in range(number)]


@pytest.mark.parametrize(
    ("reward", "remedy"), [(0.95, "too easy"), (0.02, "bapo reward test"), (0.5, "raise algorithm.group_size")]
)
def test_a_few_groups_per_step_are_named_with_a_remedy_by_the_mean_reward(reward: float, remedy: str) -> None:
    found = shortfall(rows(5, x1=2, x3=1, reward_mean=reward))
    assert found.startswith("nearly empty: 3.0 of 32 groups per step trained with rewards that differ (last 5 steps)")
    assert remedy in found


def test_groups_whose_rewards_are_equal_fill_no_batch() -> None:
    """GRPO trains all 32 of them, of which two teach something."""
    found = shortfall(rows(5, x1=32, x3=0, num_informative=2, num_informative_trained=2))
    assert found.startswith("nearly empty: 2.0 of 32")


def test_informative_groups_that_were_left_out_are_not_blamed_on_the_prompts() -> None:
    found = shortfall(rows(5, x1=1, x3=0, num_informative=20, num_informative_trained=1))
    assert "`bapo explain RUN all STEP`" in found


@pytest.mark.parametrize(
    "metrics",
    [
        rows(4, x1=0, x3=0),  # too few steps to say
        rows(20, x1=10, x3=0),  # 31 %
        rows(30, x1=0, x3=0) + rows(20, x1=32, x3=0),  # long ago
        rows(20, x1=32, x3=0, num_informative=2, num_informative_trained=2, teacher_kl=0.1),  # all learn from a teacher
        [],
    ],
)
def test_other_runs_are_not_warned(metrics: list[dict[str, Any]]) -> None:
    assert shortfall(metrics) == ""
