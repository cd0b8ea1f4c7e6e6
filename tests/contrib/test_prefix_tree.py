"""Credit per token from shared prefixes, on a tree that is drawn by hand.

1 --2--> 3     reward 1
'   '--> 4     reward 0
'--5--> 6      reward 0
'--5--> 6      reward 0
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bapo.config.tree import Config
from contrib.prefix_tree import prefix_values, shared_lengths
from learner.advantages.base import load_advantage
from learner.advantages.of_batch import token_advantages
from tests.support.factories import make_batch, make_group
from tests.support.learner import learner_config

RESPONSES = [np.array(tokens) for tokens in ([1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 5, 6])]
REWARDS = np.array([1.0, 0.0, 0.0, 0.0])


def advantages(**loss: object) -> list[list[float]]:
    config: Config = learner_config(loss={"kl_coef": 0.0, "entropy_coef": 0.0, "advantage_norm": "center", **loss})
    group = replace(make_group(rewards="1000", lengths=[3] * 4), token_ids=np.concatenate(RESPONSES).astype(np.int32))
    batch = make_batch(groups=[group], step=1)
    advantage = load_advantage(config.loss)
    return token_advantages(batch, advantage, config).reshape(4, 3).tolist()


def test_shared_lengths_end_where_two_responses_part() -> None:
    assert shared_lengths(RESPONSES).tolist() == [[3, 2, 1, 1], [2, 3, 1, 1], [1, 1, 3, 3], [1, 1, 3, 3]]


def test_a_response_that_ends_inside_another_shares_all_of_it() -> None:
    assert shared_lengths([np.array([1, 2]), np.array([1, 2, 3])]).tolist() == [[2, 2], [2, 3]]


def test_the_value_of_a_prefix_is_the_mean_reward_of_those_that_begin_with_it() -> None:
    values = prefix_values(RESPONSES, REWARDS)
    assert [v.tolist() for v in values] == [[1 / 4, 1 / 4, 1 / 2], [1 / 4, 1 / 4, 1 / 2], *[[1 / 4, 1 / 4, 0]] * 2]


def test_with_lambda_0_only_the_token_at_a_fork_has_credit() -> None:
    assert advantages(advantage="tree") == [[0, 1 / 4, 1 / 2], [0, 1 / 4, -1 / 2], [0, -1 / 4, 0], [0, -1 / 4, 0]]


def test_with_lambda_1_the_baseline_of_a_token_is_the_value_before_it() -> None:
    want = [[3 / 4, 3 / 4, 1 / 2], [-1 / 4, -1 / 4, -1 / 2], *[[-1 / 4, -1 / 4, 0]] * 2]
    assert advantages(advantage="tree", advantage_options={"gae_lambda": 1.0}) == want


def test_tempo_adds_the_credit_of_forks_to_that_of_the_group() -> None:
    # r - mean is 3/4 and -1/4.
    want = [[3 / 4, 1, 5 / 4], [-1 / 4, 0, -3 / 4], *[[-1 / 4, -1 / 2, -1 / 4]] * 2]
    assert advantages(advantage="tempo") == want


def test_credit_is_divided_by_the_deviation_of_the_group() -> None:
    scaled = advantages(advantage="tree", advantage_norm="pop_var", advantage_eps=0.0)
    assert scaled[0] == pytest.approx([0, 1 / 4 / np.sqrt(3 / 16), 1 / 2 / np.sqrt(3 / 16)])
