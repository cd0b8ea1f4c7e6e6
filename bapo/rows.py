"""Rows of groups: which of them a batch trains together, how they are named, and how they become one group.

    Item(parts) --item_id--> "fresh-00000012"                        a stored group, whole
                             "fresh-00000012:0,2+fresh-00000003:1"   rows 0 and 2 of one, row 1 of another

An item's rows share one advantage baseline, so they answer one prompt. The buffer forwards frames as they are stored:
the selection of rows travels in the header of the batch, and is applied where the batch is unpacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from bapo.columns import Int32s
from bapo.errors import ContractError
from bapo.spans import runs_of
from bapo.types import Group, Origin

Rows = tuple[int, ...]
Kind = Literal["rl", "sft"]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one stored group."""

    group_id: str
    rows: Rows | None = None
    """In the order in which they are trained; None: all of them."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One item of a batch: what trains together, and why."""

    origin: Origin
    parts: tuple[Part, ...]
    kind: Kind = "rl"
    weight: float = 1.0

    @property
    def item_id(self) -> str:
        """Of a whole group its own id."""
        if len(self.parts) == 1:  # as good as always, and asked for several times in every assembly
            return _part_id(self.parts[0])
        return "+".join(_part_id(part) for part in self.parts)

    @property
    def group_ids(self) -> tuple[str, ...]:
        """Of its parts."""
        if len(self.parts) == 1:
            return (self.parts[0].group_id,)
        return tuple(part.group_id for part in self.parts)

    @property
    def is_plain(self) -> bool:
        """A whole group, trained by the surrogate with weight 1."""
        return len(self.parts) == 1 and self.parts[0].rows is None and self.kind == "rl" and self.weight == 1.0


def whole(origin: Origin, group_id: str) -> Item:
    """The item that is one stored group."""
    return Item(origin=origin, parts=(Part(group_id=group_id),))


def _part_id(part: Part) -> str:
    return part.group_id if part.rows is None else f"{part.group_id}:{','.join(map(str, part.rows))}"


def joined(item_id: str, parts: Sequence[tuple[Group, Rows | None]]) -> Group:
    """One group made of rows of several; what is said of a group as a whole comes from the first.

    Raises: ContractError when they answer different prompts, or a row is not there.
    """
    first = parts[0][0]
    chosen = [(group, range(group.size) if rows is None else rows) for group, rows in parts]
    for group, rows in chosen:
        if not np.array_equal(group.prompt_token_ids, first.prompt_token_ids):
            raise ContractError(f"item {item_id} joins groups of different prompts")
        if any(not 0 <= row < group.size for row in rows):
            raise ContractError(f"item {item_id} names a row that group {group.group_id} of {group.size} does not have")
    ends = {id(group): np.cumsum(group.lengths) for group, _ in chosen}
    spans = [
        (group, slice(int(ends[id(group)][row] - group.lengths[row]), int(ends[id(group)][row])))
        for group, rows in chosen
        for row in rows
    ]
    if not spans:
        raise ContractError(f"item {item_id} has no rows")
    return Group(
        group_id=item_id,
        prompt=first.prompt,
        purpose=first.purpose,
        step=first.step,
        label=first.label,
        worker_id=first.worker_id,
        prompt_token_ids=first.prompt_token_ids,
        token_ids=np.concatenate([group.token_ids[span] for group, span in spans]),
        rollout_logprobs=np.concatenate([group.rollout_logprobs[span] for group, span in spans]),
        lengths=np.concatenate([group.lengths[list(rows)] for group, rows in chosen]),
        rewards=np.concatenate([group.rewards[list(rows)] for group, rows in chosen]),
        outcomes=np.concatenate([group.outcomes[list(rows)] for group, rows in chosen]),
        versions=np.concatenate([group.versions[list(rows)] for group, rows in chosen]),
        timing=first.timing,
        spans=_joined_spans(spans),
    )


def _joined_spans(spans: Sequence[tuple[Group, slice]]) -> Int32s | None:
    if all(group.spans is None for group, _ in spans):
        return None
    return runs_of(np.concatenate([group.token_versions[span] for group, span in spans]))
