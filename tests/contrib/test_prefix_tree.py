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
from contrib.prefix_tree import prefix_values, shared_lengths, tree_credit
from learner.advantages.base import load_advantage
from learner.advantages.of_batch import token_advantages
from tests.support.factories import make_batch, make_group
from tests.support.learner import learner_config

RESPONSES = [np.array(tokens) for tokens in ([1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 5, 6])]
REWARDS = np.array([1.0, 0.0, 0.0, 0.0])
GROUP = replace(make_group(rewards="1000", lengths=[3] * 4), token_ids=np.concatenate(RESPONSES).astype(np.int32))


def advantages(**loss: object) -> list[list[float]]:
    config: Config = learner_config(loss={"kl_coef": 0.0, "entropy_coef": 0.0, "advantage_norm": "center", **loss})
    batch = make_batch(groups=[GROUP], step=1)
    advantage = load_advantage(config.loss)
    return token_advantages(batch, advantage, config).reshape(4, 3).tolist()


def test_shared_lengths_end_where_two_responses_part() -> None:
    assert shared_lengths(RESPONSES).tolist() == [[3, 2, 1, 1], [2, 3, 1, 1], [1, 1, 3, 3], [1, 1, 3, 3]]


def test_a_response_that_ends_inside_another_shares_all_of_it() -> None:
    assert shared_lengths([np.array([1, 2]), np.array([1, 2, 3])]).tolist() == [[2, 2], [2, 3]]


def test_the_value_of_a_prefix_is_the_mean_reward_of_those_that_begin_with_it() -> None:
    values = prefix_values(RESPONSES, REWARDS)
    assert [v.tolist() for v in values] == [[1 / 4, 1 / 4, 1 / 2], [1 / 4, 1 / 4, 1 / 2], *[[1 / 4, 1 / 4, 0]] * 2]


def test_only_the_token_at_a_fork_has_credit() -> None:
    credit = tree_credit(GROUP, REWARDS).reshape(4, 3).tolist()
    assert credit == [[0, 1 / 4, 1 / 2], [0, 1 / 4, -1 / 2], [0, -1 / 4, 0], [0, -1 / 4, 0]]


def test_tempo_adds_the_credit_of_forks_to_that_of_the_group() -> None:
    # r - mean is 3/4 and -1/4.
    want = [[3 / 4, 1, 5 / 4], [-1 / 4, 0, -3 / 4], *[[-1 / 4, -1 / 2, -1 / 4]] * 2]
    assert advantages(advantage="tempo") == want


def test_credit_is_divided_by_the_deviation_of_the_group() -> None:
    scaled = advantages(advantage="tempo", advantage_norm="pop_var", advantage_eps=0.0)
    assert scaled[0] == pytest.approx(np.array([3 / 4, 1, 5 / 4]) / np.sqrt(3 / 16))
