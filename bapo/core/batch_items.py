"""The items of a batch in its header: which rows of which frames are one entry.

    plain batch    origins [x1, x3, ...]: the i-th frame is the i-th entry
    other batches  origins, and `items`: of each entry [kind, weight, [[frame, rows or null, replayed], ...]]

The service forwards stored frames unopened; rows are selected where the batch is unpacked. `replayed` is one boolean
for all rows of a part. A batch that is packed again after it was opened has one frame per entry, and `replayed` is then
a list with one boolean per row.

    Item(parts) --item_id--> "fresh-00000012"                        a stored group, whole
                             "fresh-00000012:0,2+fresh-00000003:1"   rows 0 and 2 of one, row 1 of another
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from bapo.core.errors import ContractError
from bapo.core.reward_details import joined_details
from bapo.core.sequences import SampledSequence, group_columns, sequences_of
from bapo.core.token_arrays import Int32s
from bapo.core.turns import common_start, one_turn
from bapo.core.types import PER_RESPONSE, BatchEntry, Count, Group, Origin

ITEMS = "items"
BAD_FRAME = "bad_frame"
"""Reason of a group with a corrupt frame, which is in no batch."""

Rows = tuple[int, ...]
Kind = Literal["rl", "sft"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Selection = tuple[Count, Rows | None, bool | list[bool]]
"""Frame, rows (None: all), replayed."""


class BatchHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of a batch frame, as it is stored."""

    step: int
    origins: list[Origin]
    items: list[tuple[Kind, Finite, Annotated[list[Selection], Meta(min_length=1)]]] | None = None
    r_tot: Finite
    facts: dict[str, int | Finite]
    results: list[dict[str, Any]]


def frame_order(items: Sequence[Item]) -> tuple[str, ...]:
    """Ids of the groups whose frames are the body of the batch, each once."""
    return tuple(dict.fromkeys(group_id for item in items for group_id in item.group_ids))


def item_fields(items: Sequence[Item], stored: Collection[str]) -> dict[str, Any]:
    """What the header says of the items.

    Args:
        stored: ids of the groups that were sampled for an earlier batch.
    """
    origins = [item.origin.value for item in items]
    # As many frames as items, all plain: each is its own frame. What X3 holds is replayed, unless it is said here.
    if all(item.is_plain and (item.group_ids[0] in stored) == (item.origin is Origin.X3) for item in items):
        return {"origins": origins}
    places = {group_id: place for place, group_id in enumerate(frame_order(items))}

    def row(part: Part) -> list[Any]:
        return [places[part.group_id], None if part.rows is None else list(part.rows), part.group_id in stored]

    rows = [[item.kind, item.weight, [row(part) for part in item.parts]] for item in items]
    return {"origins": origins, ITEMS: rows}


def entry_fields(entries: Sequence[BatchEntry]) -> dict[str, Any]:
    """What the header says of entries that each are a frame of their own."""
    origins = [entry.origin.value for entry in entries]
    if all(entry.kind == "rl" and entry.weight == 1.0 and entry.replayed is None for entry in entries):
        return {"origins": origins}
    rows = [
        [entry.kind, entry.weight, [[place, None, entry.replayed_rows.tolist()]]] for place, entry in enumerate(entries)
    ]
    return {"origins": origins, ITEMS: rows}


def entries_of(header: BatchHeader, groups: Sequence[Group]) -> Iterator[BatchEntry]:
    """The entries that a batch's header makes of its groups. Raises: ContractError."""
    origins, items = header.origins, header.items
    where = f"batch {header.step}"
    if len(origins) != len(groups if items is None else items):
        what = f"{len(groups)} groups" if items is None else f"{len(items)} items"
        raise ContractError(f"{where}: {len(origins)} origins but {what}")
    if items is None:
        yield from (BatchEntry(origin=origin, group=group) for origin, group in zip(origins, groups, strict=True))
        return
    for origin, (kind, weight, selections) in zip(origins, items, strict=True):
        try:
            parts = [(groups[place], rows) for place, rows, _ in selections]
            replayed = [_replayed(word, part) for (*_, word), part in zip(selections, parts, strict=True)]
        except (ValueError, IndexError) as error:
            raise ContractError(f"{where}: an item is malformed: {selections!r:.200}") from error
        group = parts[0][0]
        if len(parts) > 1 or parts[0][1] is not None:
            named = tuple(Part(group_id=group.group_id, rows=rows) for group, rows in parts)
            group = joined(Item(origin=origin, parts=named).item_id, parts)
        yield BatchEntry(origin=origin, group=group, kind=kind, weight=weight, replayed=np.concatenate(replayed))


def without_groups(header: Mapping[str, Any], group_ids: Sequence[str], bad: Collection[str]) -> dict[str, Any]:
    """The header of the same batch without some of its frames, and without the items that need one of them.

    Args:
        group_ids: of the frames, in their order.
        bad: those whose frames are left out; they, and what trained with them alone, have the reason BAD_FRAME.
    """
    places = {old: new for new, old in enumerate(i for i, name in enumerate(group_ids) if name not in bad)}
    items = header.get(ITEMS)
    parts = [[(i, None, None)] for i in range(len(group_ids))] if items is None else [rows for _, _, rows in items]
    kept = [i for i, rows in enumerate(parts) if all(place in places for place, _, _ in rows)]
    trained = {group_ids[place] for i in kept for place, _, _ in parts[i]}
    gone = {group_ids[place] for rows in parts for place, _, _ in rows} - trained
    changed = {**header, "origins": [header["origins"][i] for i in kept]}
    if items is not None:
        renumbered = [[[places[place], *rest] for place, *rest in parts[i]] for i in kept]
        changed[ITEMS] = [[*items[i][:2], rows] for i, rows in zip(kept, renumbered, strict=True)]
    changed["results"] = [_untrained(result) if result["group_id"] in gone else result for result in header["results"]]
    return changed


def _untrained(result: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in result.items() if name not in ("item", "rows", "kind")}
    return {**kept, "origin": None, "reason": BAD_FRAME}


def _replayed(word: Any, part: tuple[Group, Rows | None]) -> NDArray[np.bool_]:
    group, rows = part
    size = group.size if rows is None else len(rows)
    if isinstance(word, list) and len(word) != size:
        raise ValueError(f"{len(word)} words for {size} rows")
    return np.broadcast_to(np.array(word, dtype=np.bool_), (size,))


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

    Of episodes the engine sees more than the prompt, such as tools or the hour: its tokens are those with which all
    groups begin, and the rest is context.
    Raises: ContractError when they answer different prompts, or a row is not there.
    """
    first = parts[0][0]
    chosen = [(group, range(group.size) if rows is None else rows) for group, rows in parts]
    for group, rows in chosen:
        has_turns = first.turns is not None or group.turns is not None
        if not (
            first.prompt.prompt_id == group.prompt.prompt_id
            if has_turns
            else np.array_equal(group.prompt_token_ids, first.prompt_token_ids)
        ):
            raise ContractError(f"item {item_id} joins groups of different prompts")
        if any(not 0 <= row < group.size for row in rows):
            raise ContractError(f"item {item_id} references a missing row of group {group.group_id} ({group.size})")
    prompt = common_start([group.prompt_token_ids for group, _ in chosen])
    sequences = [_after(prompt, group, sequence) for group, rows in chosen for sequence in sequences_of(group, rows)]
    if not sequences:
        raise ContractError(f"item {item_id} has no rows")
    columns = {
        name: np.concatenate([getattr(group, name)[list(rows)] for group, rows in chosen]) for name in PER_RESPONSE
    }
    chosen_details = [({n: v[list(rows)] for n, v in g.reward_details.items()}, len(rows)) for g, rows in chosen]
    columns["reward_details"] = joined_details(chosen_details)
    return replace(first, group_id=item_id, prompt_token_ids=prompt, **group_columns(sequences) | columns)


def _after(prompt: Int32s, group: Group, sequence: SampledSequence) -> SampledSequence:
    """The response of a group, of whose prompt only this beginning is left."""
    rest = group.prompt_token_ids[len(prompt) :]
    if not len(rest):
        return sequence
    turns = sequence.turns or one_turn(len(sequence.token_ids))
    return replace(sequence, turns=turns.with_rest(rest, has_prompt=len(prompt) > 0))
