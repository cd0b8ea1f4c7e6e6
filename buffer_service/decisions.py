"""What a composer decides is checked before it becomes state: a composer may be anybody's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

from bapo.algorithms.composer import Composer, Decision
from bapo.algorithms.settings import AlgorithmConfig
from bapo.batch_items import KINDS
from bapo.errors import ContractError
from bapo.rows import Item
from buffer_service.groups import GroupRecord
from buffer_service.values import Tables


def check_decision(
    decision: Decision,
    composer: Composer,
    settings: AlgorithmConfig,
    looked_at: Sequence[GroupRecord],
    before: Tables,
) -> None:
    """Raises: ContractError for the first promise of a Decision that this one breaks."""
    name = settings.name
    known = {record.group_id: (record.prompt_id, len(record.rewards)) for record in looked_at}
    available = {**{stat.group_id: (stat.prompt_id, len(stat.rewards)) for stat in before.high}, **known}
    _check_items(name, decision.items, settings.batch_size)
    used = [group_id for item in decision.items for group_id in item.group_ids]
    for what, found in (("trains", used), ("keeps in B_high", [stat.group_id for stat in decision.high])):
        if unknown := sorted(set(found) - available.keys()):
            raise ContractError(f"composer {name!r} {what} groups that the buffer does not hold: {unknown[:3]}")
    if again := _twice(stat.group_id for stat in decision.high):
        raise ContractError(f"composer {name!r} keeps groups in B_high twice: {again[:3]}")
    _check_parts(name, decision.items, available)
    if composer.prompts_once:
        prompts = [available[item.group_ids[0]][0] for item in decision.items if item.kind == "rl"]
        if again := _twice(prompts):
            raise ContractError(f"composer {name!r} trains a prompt twice in one step: {again[:3]}")
    if silent := sorted(known.keys() - decision.reasons.keys()):
        raise ContractError(f"composer {name!r} gives no reason for {len(silent)} groups: {silent[:3]}")


def _check_items(name: str, items: Sequence[Item], batch_size: int) -> None:
    if again := _twice(item.item_id for item in items):
        raise ContractError(f"composer {name!r} trains items twice: {again[:3]}")
    for kind in KINDS:
        if (number := sum(item.kind == kind for item in items)) > batch_size:
            raise ContractError(f"composer {name!r} trains {number} items of kind {kind}, more than B = {batch_size}")


def _check_parts(name: str, items: Sequence[Item], available: Mapping[str, tuple[str, int]]) -> None:
    """An item has rows, of groups of one prompt, each row once."""
    for item in items:
        if len(item.parts) == 1 and item.parts[0].rows is None:
            continue  # most are whole groups, which have rows, of one prompt, and name each once
        rows = [(part.group_id, row) for part in item.parts for row in (part.rows or ())]
        is_empty = not item.parts or any(part.rows == () for part in item.parts)
        beyond = [group_id for group_id, row in rows if not 0 <= row < available[group_id][1]]
        if is_empty or beyond or _twice(rows) or _twice(item.group_ids):
            raise ContractError(f"composer {name!r}: item {item.item_id!r:.200} does not name rows, each of them once")
        if len({available[group_id][0] for group_id in item.group_ids}) > 1:
            raise ContractError(f"composer {name!r}: item {item.item_id!r:.200} joins groups of different prompts")


def _twice(values: Iterable[Hashable]) -> list[Hashable]:
    listed = list(values)
    if len(set(listed)) == len(listed):  # as good as always: counting takes five times longer
        return []
    return [value for value, number in Counter(listed).items() if number > 1]
