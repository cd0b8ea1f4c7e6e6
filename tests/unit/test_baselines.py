"""Which items of a batch have an advantage: rewards of rows that share a baseline, an expert's and stored ones too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bapo.core.baselines import items_with_advantage
from bapo.core.codec import pack_group, read_group_header
from bapo.core.types import GroupResult, Origin, Outcome
from buffer_service.state import record_of
from tests.support.factories import make_group, make_result

STEP = 3
WITH_EXPERT = bytes([Outcome.GRADED] * 3 + [Outcome.EXPERT])


def trained(rewards: str, group_id: str = "g", birth: int = STEP, **fields: Any) -> GroupResult:
    return replace(make_result(rewards=rewards, group_id=group_id, birth=birth), **fields)


@pytest.mark.parametrize(
    ("results", "pool", "has"),
    [
        ([trained("0110")], "mixed", True),
        ([trained("0000")], "mixed", False),
        ([trained("0110", origin=None)], "mixed", False),
        # LUFFY: 0 - 1/4 for the sampled rows, 1 - 1/4 for the expert's.
        ([trained("0001", outcomes=WITH_EXPERT)], "mixed", True),
        ([trained("1111", outcomes=WITH_EXPERT)], "mixed", False),
        # Against the fresh rows alone, their mean is 0: the expert's row has 1.
        ([trained("0001", outcomes=WITH_EXPERT)], "on_policy", True),
        # Apart: the sampled rows have none, the expert's has no other and is as good as its reward.
        ([trained("0001", outcomes=WITH_EXPERT)], "split", True),
        ([trained("0000", outcomes=WITH_EXPERT)], "split", False),
        # ReLIFT: the expert's row is not in the item; or it trains by cross-entropy.
        ([trained("0001", outcomes=WITH_EXPERT, rows=(0, 1, 2), item="g:0,1,2")], "mixed", False),
        ([trained("0001", outcomes=WITH_EXPERT, rows=(3,), item="g:3", kind="sft")], "mixed", False),
        # A stored group is its own baseline.
        ([trained("0110", birth=1, origin=Origin.X3)], "split", True),
    ],
)
def test_an_item_has_an_advantage_where_rows_of_its_baseline_differ(
    results: Sequence[GroupResult], pool: str, has: bool
) -> None:
    assert bool(items_with_advantage(results, STEP, pool)) is has


def test_stored_rows_that_join_fresh_ones_share_their_baseline_unless_it_is_split() -> None:
    item = "g:0,1+old:2,3"
    fresh = trained("0000", rows=(0, 1), item=item)
    stored = trained("0011", "old", birth=1, rows=(2, 3), item=item)
    assert items_with_advantage([fresh, stored], STEP, "mixed") == {item}
    assert items_with_advantage([fresh, stored], STEP, "split") == set()
    better = trained("0011", "old", birth=1, rows=(1, 2), item=item)
    assert items_with_advantage([fresh, better], STEP, "split") == {item}


def test_the_record_of_a_group_counts_tokens_and_correct_responses_without_those_of_an_expert() -> None:
    group = make_group(rewards="0101", lengths=[5, 6, 7, 500], experts=[3])
    record = record_of(read_group_header(pack_group(group)), 100, "0" * 32)
    assert (record.num_tokens, record.outcome) == (18, ("p", 1.0, 3))
    plain = record_of(read_group_header(pack_group(make_group(rewards="0101", lengths=[5, 6, 7, 8]))), 100, "0" * 32)
    assert (plain.num_tokens, plain.outcome) == (26, ("p", 2.0, 4))
