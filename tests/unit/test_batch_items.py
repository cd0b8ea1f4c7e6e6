"""Items in a batch's header: whole groups cost nothing, rows of several groups become one entry, damage is refused."""

from __future__ import annotations

from typing import Any

import pytest

from bapo.core.batch_items import (
    BatchHeader,
    Item,
    Part,
    entries_of,
    frame_order,
    item_fields,
    joined,
    whole,
    without_groups,
)
from bapo.core.codec import pack_batch, pack_batch_frames, pack_group, read_group_header, unpack_batch
from bapo.core.errors import ContractError
from bapo.core.json_values import from_map
from bapo.core.types import BatchEntry, Group, Origin, Outcome
from tests.support.factories import make_group, make_prompt

PROMPT = make_prompt(prompt_id="p")
OLD = make_group(group_id="old", prompt=PROMPT, rewards="01", lengths=[2, 3], version=1)
NEW = make_group(group_id="new", prompt=PROMPT, rewards="100", lengths=[1, 2, 1], version=4, truncated=[2])


def header_of(*items: Item, stored: set[str] | None = None) -> dict[str, Any]:
    numbers = {"step": 7, "r_tot": 0.5, "facts": {}, "results": []}
    return {**numbers, **item_fields(items, {"old"} if stored is None else stored)}


def entries(header: dict[str, Any], *groups: Group) -> list[BatchEntry]:
    return list(entries_of(from_map(header, BatchHeader, "batch header"), groups))


def test_a_batch_of_whole_groups_has_origins_alone() -> None:
    items = [whole(Origin.X1, "new"), whole(Origin.X3, "old")]
    assert item_fields(items, {"old"}) == {"origins": ["x1", "x3"]}


def test_rows_of_stored_and_fresh_groups_become_one_entry() -> None:
    item = Item(origin=Origin.X1, parts=(Part(group_id="old", rows=(1,)), Part(group_id="new", rows=(2, 0))), weight=2)
    assert item.item_id == "old:1+new:2,0"
    batch = unpack_batch(pack_batch_frames(header_of(item), [pack_group(OLD), pack_group(NEW)]))
    (entry,) = batch.entries
    assert (entry.origin, entry.kind, entry.weight, entry.group.group_id) == (Origin.X1, "rl", 2.0, "old:1+new:2,0")
    assert entry.replayed_rows.tolist() == [True, False, False]
    group = entry.group
    assert group.rewards.tolist() == [1.0, 0.0, 1.0]
    assert group.lengths.tolist() == [3, 1, 1]
    # old: tokens 100, 101 | 102, 103, 104;  new: 100 | 101, 102 | 103
    assert group.token_ids.tolist() == [102, 103, 104, 103, 100]
    assert group.versions.tolist() == [[1, 1], [4, 4], [4, 4]]
    assert group.outcomes.tolist() == [Outcome.GRADED, Outcome.TRUNCATED, Outcome.GRADED]
    assert group.policy_version == 1


def test_a_group_that_two_items_share_is_sent_once() -> None:
    items = [
        Item(origin=Origin.X1, parts=(Part(group_id="new", rows=(0, 1)),)),
        Item(origin=Origin.X3, parts=(Part(group_id="new", rows=(2,)),), kind="sft"),
    ]
    assert frame_order(items) == ("new",)
    batch = unpack_batch(pack_batch_frames(header_of(*items), [pack_group(NEW)]))
    assert [(entry.kind, entry.group.size, entry.replayed_rows.tolist()) for entry in batch.entries] == [
        ("rl", 2, [False, False]),
        ("sft", 1, [False]),
    ]


def test_rows_of_different_prompts_are_refused() -> None:
    other = make_group(group_id="other", prompt_id="q", num_prompt_tokens=2)
    with pytest.raises(ContractError, match="joins groups of different prompts"):
        joined("x", [(OLD, None), (other, (0,))])


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([["rl", 1.0, [[0, None, False]]]], "2 origins but 1 items"),
        ([["rl", 1.0, [[0, None, False]]], ["rl", 1.0]], "array` of length 3, got 2"),
        ([["rl", 1.0, [[0, None, False]]], ["rl", 1.0, [[2, None, False]]]], "an item is malformed"),
        ([["rl", 1.0, [[0, None, False]]], ["rl", 1.0, [[-1, None, False]]]], "Expected `int` >= 0"),
        ([["rl", 1.0, [[0, None, False]]], ["rl", 1.0, []]], "array` of length >= 1"),
        ([["rl", 1.0, [[0, None, False]]], ["rest", 1.0, [[1, None, False]]]], "Invalid enum value 'rest'"),
        ([["rl", 1.0, [[0, None, False]]], ["rl", float("nan"), [[1, None, False]]]], "Expected `float` >= "),
        ([["rl", 1.0, [[0, None, False]]], ["rl", 1.0, [[1, ["0"], False]]]], "Expected `int`, got `str`"),
        (
            [["rl", 1.0, [[0, None, False]]], ["rl", 1.0, [[1, [3], False]]]],
            "references a missing row",
        ),
        ([["rl", 1.0, [[0, None, False]]], ["rl", 1.0, [[1, [], False]]]], "has no rows"),
        ([["rl", 1.0, [[0, None, False]]], ["rl", 1.0, [[1, None, [True, False]]]]], "an item is malformed"),
    ],
)
def test_a_damaged_header_is_refused(items: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        entries({"step": 7, "origins": ["x1", "x1"], "items": items, "r_tot": 0, "facts": {}, "results": []}, OLD, NEW)


def test_a_batch_that_was_opened_is_packed_again_with_all_that_its_entries_say() -> None:
    items = [
        Item(origin=Origin.X1, parts=(Part(group_id="old", rows=(1,)), Part(group_id="new", rows=(2, 0))), weight=2),
        Item(origin=Origin.X1, parts=(Part(group_id="new", rows=(1,)),), kind="sft"),
        whole(Origin.X3, "new"),
    ]
    opened = unpack_batch(pack_batch_frames(header_of(*items), [pack_group(OLD), pack_group(NEW)]))
    again = unpack_batch(pack_batch(opened))
    assert [(entry.origin, entry.kind, entry.weight) for entry in again.entries] == [
        (Origin.X1, "rl", 2.0),
        (Origin.X1, "sft", 1.0),
        (Origin.X3, "rl", 1.0),
    ]
    assert [entry.replayed_rows.tolist() for entry in again.entries] == [[True, False, False], [False], [False] * 3]
    assert [entry.group.group_id for entry in again.entries] == ["old:1+new:2,0", "new:1", "new"]
    assert again.entries[0].group.token_ids.tolist() == [102, 103, 104, 103, 100]
    assert pack_batch(again) == pack_batch(opened)


def test_the_buffer_takes_no_group_without_a_sampled_response() -> None:
    with pytest.raises(ContractError, match="all responses are expert responses"):
        read_group_header(pack_group(make_group(rewards="1", experts=[0])))


def test_a_batch_goes_on_without_a_bad_frame_and_the_items_that_need_it() -> None:
    third = make_group(group_id="third", prompt=PROMPT, rewards="10", version=4)
    mixed = Item(origin=Origin.X1, parts=(Part(group_id="new", rows=(1, 0)), Part(group_id="old", rows=(1,))))
    items = [mixed, whole(Origin.X1, "third")]
    results = [{"group_id": name, "origin": "x1", "reason": "r", "item": "i", "rows": [0], "kind": "rl"}
             for name in ("new", "old", "third", "other")]  # fmt: skip
    header = {**header_of(*items), "results": results}
    kept = without_groups(header, frame_order(items), {"old"})
    (entry,) = entries(kept, NEW, third)
    assert entry.group is third
    told = {result["group_id"]: (result["origin"], result["reason"], "item" in result) for result in kept["results"]}
    assert told["new"] == told["old"] == (None, "bad_frame", False)
    assert told["third"] == told["other"] == ("x1", "r", True)


def test_a_batch_of_whole_groups_goes_on_without_a_bad_frame() -> None:
    header = header_of(whole(Origin.X1, "new"), whole(Origin.X3, "old"))
    kept = without_groups(header, ["new", "old"], {"new"})
    assert [(e.origin, e.group.group_id) for e in entries(kept, OLD)] == [(Origin.X3, "old")]
    assert entries(without_groups(header, ["new", "old"], {"new", "old"})) == []
