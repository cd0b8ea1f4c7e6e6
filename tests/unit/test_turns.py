"""Episodes of several turns: what is stored, what is packed, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bapo.core.batch_items import joined
from bapo.core.codec import pack_group, read_group_header, unpack_group
from bapo.core.errors import ConfigError, ContractError
from bapo.core.sequences import group_columns, sequences_of
from bapo.core.types import Group
from contrib.prefix_tree import tree_credit
from learner.batch.columns import columns_of
from learner.batch.microbatch import Piece, build
from learner.batch.packing import PassCost, _Weights
from tests.support.episodes import histories_of
from tests.support.factories import make_batch, make_group, make_prompt
from tests.support.learner import CPU, learner_config


def episodes() -> Group:
    """Two responses to the prompt 10 11: one of three turns, of which two continue the first, and a plain one.

    prompt 10 11 | 20 | 30 31 | 21 | 32         turn 0, then turn 1
                              | 22 23 | 33 34   turn 2
    """
    group = make_group(rewards="10", lengths=[5, 2])
    return replace(
        group,
        prompt_token_ids=np.array([10, 11], np.int32),
        token_ids=np.array([30, 31, 32, 33, 34, 40, 41], np.int32),
        turns=np.array([[0, -1, 1, 2], [0, 0, 1, 1], [0, 0, 2, 2], [1, -1, 0, 2]], np.int32),
        context_ids=np.array([20, 21, 22, 23], np.int32),
    )


def test_turns_are_packed_once_and_predicted_by_the_token_before_them() -> None:
    columns = columns_of(make_batch(groups=[episodes()]), learner_config())
    micro = build(columns, [Piece(group=0, responses=(0, 1))], CPU)
    #                                  prompt  c0  s0 s0   c1 | c2 c2  s2 | plain        32, 34 and 41 predict nothing
    assert micro.token_ids_N.tolist() == [10, 11, 20, 30, 31, 21, 22, 23, 33, 40]
    assert micro.positions_N.tolist() == [0, 1, 2, 3, 4, 5, 5, 6, 7, 2]
    assert micro.target_M.tolist() == [30, 31, 32, 33, 34, 40, 41]
    assert micro.token_ids_N[micro.predict_M].tolist() == [20, 30, 21, 23, 33, 11, 40]
    assert (micro.rows.index_M.tolist(), micro.rows.count) == ([0, 0, 0, 0, 0, 1, 1], 2)
    rows = [bucket.tokens_RW.view(bucket.num_rows, -1).tolist() for bucket in micro.packing.buckets]
    assert rows == [[[0, 1, 2, 3, 4, 6, 7, 8]], [[0, 1, 2, 3, 4, 5]], [[0, 1, 9]]]


def test_the_plan_counts_what_is_packed_and_the_square_of_every_row() -> None:
    weights = _Weights(columns_of(make_batch(groups=[episodes()]), learner_config()), PassCost(head=0.0, attention=1.0))
    assert weights.tokens(Piece(group=0, responses=(0,))) == 2 + 7
    assert weights.flops([Piece(group=0, responses=(0,))]) == 2 + 7 + 8**2 + 6**2


def test_a_prompt_that_no_turn_begins_with_is_not_packed() -> None:
    group = replace(
        episodes(),
        prompt_token_ids=np.zeros(0, np.int32),
        turns=np.array([[0, -2, 2, 5], [1, -2, 2, 2]], np.int32),
    )
    micro = build(columns_of(make_batch(groups=[group]), learner_config()), [Piece(group=0, responses=(0, 1))], CPU)
    assert micro.token_ids_N.tolist() == [20, 21, 30, 31, 32, 33, 22, 23, 40]
    assert micro.positions_N.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]


def assert_same_turns(found: Group, want: Group) -> None:
    for name in ("turns", "context_ids", "token_ids", "lengths"):
        np.testing.assert_array_equal(getattr(found, name), getattr(want, name), err_msg=name, strict=True)


def test_turns_travel_with_their_group_and_take_no_byte_of_another() -> None:
    group, frame = episodes(), pack_group(episodes())
    assert_same_turns(unpack_group(frame), group)
    header = read_group_header(frame)
    assert (header.num_tokens, header.num_context) == (7, 4)
    assert b"turns" not in pack_group(make_group())


def test_responses_taken_apart_and_put_together_are_the_same_group() -> None:
    group = episodes()
    assert_same_turns(replace(group, **group_columns(list(sequences_of(group)))), group)


def test_rows_of_an_episode_and_of_a_plain_group_become_one_entry() -> None:
    plain = replace(make_group(rewards="11", lengths=[1, 3]), prompt_token_ids=episodes().prompt_token_ids)
    both = joined("both", [(plain, [1]), (episodes(), [0])])
    assert both.turns is not None
    assert both.turns.tolist() == [[0, -1, 0, 3], [1, -1, 1, 2], [1, 0, 1, 1], [1, 0, 2, 2]]
    assert both.lengths.tolist() == [3, 5]
    assert joined("plain", [(plain, None)]).turns is None


def test_groups_of_one_prompt_whose_agents_said_more_share_what_is_common() -> None:
    other = replace(episodes(), group_id="later", prompt_token_ids=np.array([10, 12, 13], np.int32))
    both = joined("both", [(episodes(), [1]), (other, [0])])
    assert both.prompt_token_ids.tolist() == [10]
    assert histories_of(both, 0) == [([10, 11], [40, 41])]
    assert histories_of(both, 1) == [
        ([10, 12, 13, 20], [30, 31]),
        ([10, 12, 13, 20, 30, 31, 21], [32]),
        ([10, 12, 13, 20, 30, 31, 22, 23], [33, 34]),
    ]
    nothing = replace(other, prompt_token_ids=np.array([9], np.int32))
    both = joined("both", [(episodes(), [1]), (nothing, [1])])
    assert [histories_of(both, row) for row in (0, 1)] == [[([10, 11], [40, 41])], [([9], [40, 41])]]
    with pytest.raises(ContractError, match="different prompts"):
        joined("both", [(episodes(), None), (replace(other, prompt=make_prompt(prompt_id="another")), None)])


TABLE = [[0, -1, 1, 2], [0, 0, 1, 1], [0, 0, 2, 2], [1, -1, 0, 2]]


def table(number: int, column: int, value: int) -> list[list[int]]:
    """TABLE with another value."""
    return [[value if (i, j) == (number, column) else old for j, old in enumerate(row)] for i, row in enumerate(TABLE)]


WRONG = [
    ([row[:3] for row in TABLE], "rows"),
    (TABLE[:0], "rows"),
    ([TABLE[3], *TABLE[:3]], "in the order"),
    (table(3, 0, 2), "in the order"),
    (table(0, 0, -1), "in the order"),
    (table(1, 1, 1), "earlier turn"),
    (table(1, 1, 2), "earlier turn"),
    (table(3, 1, 0), "earlier turn"),  # of another response
    (table(0, 1, -3), "earlier turn"),
    (table(3, 1, -2), "token before it"),
    (table(0, 2, 2), "5 context tokens, of which 4"),
    (table(0, 2, -1), "negative"),
    (table(0, 3, 0), "at least one sampled"),
    (table(0, 3, 3), "not those of the responses"),
    (TABLE[:3], "not those of the responses"),
]


@pytest.mark.parametrize(("turns", "message"), WRONG)
def test_turns_that_contradict_their_responses_are_refused_on_both_ends(turns: Any, message: str) -> None:
    group, wrong = episodes(), np.array(turns, np.int32)
    with pytest.raises(ContractError, match=message):
        replace(group, turns=wrong)
    if wrong.shape == (4, 4):
        with pytest.raises(ContractError, match=f"{message}|body bytes"):  # which are those of other contexts
            read_group_header(pack_group(group).replace(np.array(TABLE, np.int32).tobytes(), wrong.tobytes()))


def test_a_prompt_turn_needs_a_prompt_and_context_needs_turns() -> None:
    with pytest.raises(ContractError, match="token before it"):
        replace(episodes(), prompt_token_ids=np.zeros(0, np.int32))
    with pytest.raises(ContractError, match="belong together"):
        replace(episodes(), turns=None)
    with pytest.raises(ContractError, match="must not be negative"):
        replace(episodes(), context_ids=np.array([20, 21, -1, 23], np.int32))


def test_shared_prefixes_of_episodes_are_no_shared_states() -> None:
    with pytest.raises(ConfigError, match="responses of one turn"):
        tree_credit(episodes(), np.ones(2))
