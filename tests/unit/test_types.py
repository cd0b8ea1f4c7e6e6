"""Values refuse what contradicts itself."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bapo.core.errors import BY_NAME, BapoError, ContractError
from bapo.core.sequences import sequences_of
from bapo.core.types import Group, Outcome
from tests.support.factories import make_group, make_stat


def with_column(**columns: Any) -> Group:
    return replace(make_group(rewards="10", lengths=[2, 3]), **columns)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"rewards": floats(1)}, r"rewards must be \[2\], got \[1\]"),
        ({"outcomes": np.zeros(3, np.uint8)}, r"outcomes must be \[2\], got \[3\]"),
        ({"versions": np.zeros((2, 1), np.int32)}, r"versions must be \[2, 2\], got \[2, 1\]"),
        ({"rollout_logprobs": floats(-1, -1)}, r"rollout_logprobs must be \[5\], got \[2\]"),
        ({"lengths": np.array([2, 2], np.int32)}, r"do not add up to 5 tokens"),
        ({"lengths": np.array([5, 0], np.int32)}, r"response 1 has length 0: each needs at least one token"),
        ({"lengths": np.array([6, -1], np.int32)}, r"response 1 has length -1"),
        ({"prompt_token_ids": np.zeros((1, 3), np.int32)}, r"prompt_token_ids must have one dimension, got 2"),
        ({"token_ids": np.zeros((5, 1), np.int32)}, r"token_ids must have one dimension, got 2"),
        ({"rewards": np.array([None, 1.0])}, r"rewards must be numbers, got object"),
        ({"outcomes": np.array(["graded"] * 2)}, r"outcomes must be numbers, got <U6"),
        ({"rewards": floats(0.5, 1.5)}, r"rewards must be in \[0, 1\]"),
        ({"rewards": floats(0.5, float("nan"))}, r"rewards must be in \[0, 1\]"),
        ({"rollout_logprobs": floats(-1, -1, float("nan"), -1, -1)}, r"log-probs must be in .* got nan"),
        ({"rollout_logprobs": floats(-1, -1, float("-inf"), -1, -1)}, r"log-probs must be in .* got -inf"),
        ({"rollout_logprobs": floats(-1, -1, 0.5, -1, -1)}, r"log-probs must be in .* got -1.0 to 0.5"),
        ({"token_ids": np.array([1, 2, 3, -4, 5], np.int32)}, r"token ids must not be negative"),
        ({"prompt_token_ids": np.array([-1], np.int32)}, r"token ids must not be negative"),
    ],
)
def test_a_group_refuses_columns_that_no_policy_can_give(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        with_column(**columns)


def test_a_group_without_responses_is_refused() -> None:
    with pytest.raises(ContractError, match="do not add up to 0 tokens"):
        make_group(rewards="", lengths=[])


def test_a_log_prob_may_be_above_0_by_rounding() -> None:
    assert with_column(rollout_logprobs=floats(5e-7, -1, -1, -1, -1)).size == 2


def test_the_mean_reward_and_the_oldest_version_are_those_of_the_responses() -> None:
    group = replace(
        make_group(rewards="10010000", lengths=[1] * 8),
        versions=np.array([[5, 5], [4, 5], *[[5, 6]] * 6], dtype=np.int32),
    )
    assert (group.mu, group.size, group.policy_version) == (0.25, 8, 4)


def test_responses_are_the_cuts_of_the_columns() -> None:
    group = make_group(rewards="10", lengths=[2, 3], truncated=[1])
    first, second = sequences_of(group)
    assert first.token_ids.tolist() == [100, 101]
    assert second.token_ids.tolist() == [102, 103, 104]
    assert (first.outcome, first.truncated, second.outcome) == (Outcome.GRADED, False, Outcome.TRUNCATED)
    assert second.token_ids.base is not None  # a view, not a copy


def test_values_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        make_stat(k=1).birth = 4  # type: ignore[misc]


@pytest.mark.parametrize("cls", BY_NAME.values())
def test_every_error_survives_pickling_and_has_a_status(cls: type[BapoError]) -> None:
    copy = pickle.loads(pickle.dumps(cls("the message")))
    assert (type(copy), str(copy)) == (cls, "the message")
    assert 400 <= cls.http_status < 600
    assert 1 <= cls.exit_code <= 5
