"""From a batch to micro-batches: nothing lost, nothing twice, budgets kept, ranks balanced, orders reproducible."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo.core.errors import ContractError
from bapo.core.types import Batch, BatchEntry, Origin
from learner.batch.packing import Columns, columns_of, cut, deal, microbatches_of, minibatches
from tests.support.factories import make_batch, make_group
from tests.support.learner import CPU, learner_config, random_batch

CONFIG = learner_config()


def plain_columns(prompts: list[int], lengths: list[list[int]]) -> Columns:
    """Columns of groups with these prompt lengths and response lengths."""
    groups = [
        make_group(rewards="10" + "0" * (len(sizes) - 2), prompt_id=str(i), lengths=sizes, num_prompt_tokens=prompt)
        for i, (prompt, sizes) in enumerate(zip(prompts, lengths, strict=True))
    ]
    return columns_of(make_batch(groups=groups), CONFIG)


def batch_of(*entries: BatchEntry) -> Batch:
    """A batch of these entries."""
    return replace(make_batch(groups=[entry.group for entry in entries]), entries=entries)


def test_columns_hold_the_groups_one_after_the_other_with_their_advantages() -> None:
    first = make_group(rewards="1000", prompt_id="a", lengths=[1, 2, 1, 1], logprob=-0.25)
    second = make_group(rewards="1100", prompt_id="b", lengths=[2, 1, 1, 3], logprob=-0.75)
    columns = columns_of(make_batch(groups=[first, second]), CONFIG)
    assert columns.starts_R.tolist() == [0, 1, 3, 4, 5, 7, 8, 9, 12]
    assert columns.group_R.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert columns.rollout_logprobs_M.tolist() == [-0.25] * 5 + [-0.75] * 7
    # k = 1 of 4: (1 - 1/4) / sqrt(3/16) = 1.7320 and -(1/4) / sqrt(3/16) = -0.5773; k = 2 of 4: +1 and -1.
    want = [1.732046, -0.577349, -0.577349, -0.577349, 0.999998, 0.999998, -0.999998, -0.999998]
    assert columns.advantage_R.tolist() == pytest.approx(want, abs=1e-5)


def test_the_weights_of_x2_and_x3_multiply_their_advantages_only() -> None:
    groups = [make_group(rewards="1100", prompt_id=name) for name in "abc"]
    config = learner_config(loss={"x2_weight": 2.0, "x3_weight": 0.5})
    batch = make_batch(groups=groups, origins=[Origin.X1, Origin.X2, Origin.X3])
    first_of_each = columns_of(batch, config).advantage_R[[0, 4, 8]]
    assert first_of_each.tolist() == pytest.approx([1.0, 2.0, 0.5], abs=1e-5)


def test_rows_that_were_replayed_or_are_an_experts_are_marked_and_those_of_x3_are_replayed_unless_said_otherwise() -> (
    None
):
    mixed = BatchEntry(
        origin=Origin.X1,
        group=make_group(rewards="100", experts=[0]),
        replayed=np.array([False, True, False]),
    )
    plain = BatchEntry(origin=Origin.X3, group=make_group(rewards="10", prompt_id="b"))
    columns = columns_of(batch_of(mixed, plain), CONFIG)
    assert columns.replayed_R.tolist() == [False, True, False, True, True]
    assert columns.expert_R.tolist() == [True, False, False, False, False]
    assert columns.sft_R.tolist() == [False] * 5


def test_an_entry_for_cross_entropy_has_no_advantages_and_may_have_one_row() -> None:
    expert = BatchEntry(origin=Origin.X3, group=make_group(rewards="1", experts=[0]), kind="sft", weight=0.5)
    plain = BatchEntry(origin=Origin.X1, group=make_group(rewards="10", prompt_id="b"), weight=0.5)
    columns = columns_of(batch_of(expert, plain), CONFIG)
    assert columns.sft_R.tolist() == [True, False, False]
    assert columns.advantage_R.tolist() == pytest.approx([0.0, 0.5, -0.5], abs=1e-5)


def test_a_group_without_prompt_tokens_is_refused_by_name() -> None:
    with pytest.raises(ContractError, match="g-empty has no prompt tokens"):
        columns_of(make_batch(groups=[make_group(prompt_id="empty", num_prompt_tokens=0)]), CONFIG)


@pytest.mark.parametrize(
    ("num_groups", "want"),
    [(256, [64, 64, 64, 64]), (179, [60, 60, 59]), (40, [40])],  # V20
)
def test_v20_minibatches_are_near_equal_and_hold_every_group_once(num_groups: int, want: list[int]) -> None:
    plan = minibatches(num_groups, 64, seed=42, step=9, epoch=0)
    assert [len(groups) for groups in plan] == want
    assert sorted(group for groups in plan for group in groups) == list(range(num_groups))


def test_a_group_that_does_not_fit_is_split_and_its_prompt_is_packed_again() -> None:
    # Each response costs its length less one; the prompt of 4 once per micro-batch: 4 + 3 + 3 = 10.
    columns = plain_columns([4], [[4, 4, 4]])
    cuts = cut(columns, deal(columns, np.arange(3), 1)[0], budget=10)
    assert [[piece.responses for piece in pieces] for pieces in cuts] == [[(0, 1)], [(2,)]]
    cuts = cut(columns, deal(columns, np.arange(3), 1)[0], budget=13)
    assert [[piece.responses for piece in pieces] for pieces in cuts] == [[(0, 1, 2)]]


def test_groups_are_dealt_whole_and_evenly() -> None:
    columns = plain_columns([2, 2, 2, 2], [[9, 9], [5, 5], [4, 4], [1, 1]])
    shares = deal(columns, np.arange(8), 2)
    assert [[piece.group for piece in share] for share in shares] == [[0, 3], [1, 2]]
    assert [[piece.responses for piece in share] for share in shares] == [[(0, 1), (6, 7)], [(2, 3), (4, 5)]]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    num_groups=st.integers(1, 9),
    budget=st.integers(36, 400),
    num_ranks=st.integers(1, 4),
    data=st.data(),
)
def test_every_response_token_is_trained_once_whatever_the_budget_and_the_ranks(
    seed: int, num_groups: int, budget: int, num_ranks: int, data: st.DataObject
) -> None:
    columns = columns_of(random_batch(num_groups=num_groups, seed=seed), CONFIG)
    groups = data.draw(st.lists(st.integers(0, num_groups - 1), min_size=1, unique=True))
    responses = columns.responses_of(groups)
    per_rank = [
        list(microbatches_of(columns, responses, budget=budget, rank=rank, num_ranks=num_ranks, device=CPU))
        for rank in range(num_ranks)
    ]
    assert len({len(micros) for micros in per_rank}) == 1, "all ranks run equally many micro-batches"
    slots = [slot for micros in per_rank for micro in micros for slot in micro.slot_M.tolist()]
    want = [i for r in responses for i in range(int(columns.starts_R[r]), int(columns.starts_R[r + 1]))]
    assert sorted(slots) == want
    assert all(micro.num_tokens <= budget for micros in per_rank for micro in micros)


def test_the_order_of_groups_depends_on_seed_step_and_epoch_alone() -> None:
    plan = minibatches(50, 8, seed=1, step=3, epoch=0)
    assert plan == minibatches(50, 8, seed=1, step=3, epoch=0)
    assert plan != minibatches(50, 8, seed=2, step=3, epoch=0)
    assert plan != minibatches(50, 8, seed=1, step=4, epoch=0)
    assert plan != minibatches(50, 8, seed=1, step=3, epoch=1)


def test_a_response_longer_than_the_budget_stands_alone() -> None:
    columns = plain_columns([2], [[3, 50, 3]])
    cuts = cut(columns, deal(columns, np.arange(3), 1)[0], budget=10)
    assert [[piece.responses for piece in pieces] for pieces in cuts] == [[(0,)], [(1,)], [(2,)]]
