"""Which items of a recorded batch have an advantage: rewards are compared among all rows that share a baseline.

    whole group     its rows, an expert's too                          LUFFY
    some rows       these: without an expert's, where that is left out ReLIFT
    joined rows     those of all groups of the item                    ARPO; RePO in two pools

Does not cover: advantages by penalties, a critic, a teacher or other groups of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bapo.core.types import SAME_REWARD, GroupResult, Outcome, are_equal


def item_of(result: GroupResult) -> str:
    """The item of the batch that its rows are part of."""
    return result.item or result.group_id


def items_with_advantage(results: Iterable[GroupResult], step: int, pool: str) -> frozenset[str]:
    """Names (`item_of`) of the items of one batch that have an advantage; items of kind sft have none.

    Args:
        results: of the assembly of `step`, at least all of each prompt: an item has rows of one prompt.
        pool: `loss.advantage_pool`. With split, fresh rows are compared with fresh ones and others with others.
    """
    rows: dict[str, dict[tuple[str, int], tuple[float, bool]]] = {}
    for result in results:
        if result.origin is None or result.kind == "sft":
            continue
        outcomes = result.outcomes or bytes(len(result.rewards))
        is_stored = 0 < result.birth < step
        own = rows.setdefault(item_of(result), {})
        for row in range(len(result.rewards)) if result.rows is None else result.rows:
            is_fresh = not is_stored and outcomes[row] != Outcome.EXPERT
            own[result.group_id, row] = result.rewards[row], is_fresh
    return frozenset(item for item, own in rows.items() if _have_advantage(list(own.values()), pool))


def _have_advantage(rows: Sequence[tuple[float, bool]], pool: str) -> bool:
    """Args: rows: reward of each row, and whether it was sampled for this batch."""
    pools = [[reward for reward, is_fresh in rows if is_fresh is kind] for kind in (True, False)]
    if pool != "split" or not all(pools):
        pools = [[reward for reward, _ in rows]]
    # The advantage of a row that is alone is its reward.
    return any(rewards[0] > SAME_REWARD if len(rewards) == 1 else not are_equal(rewards) for rewards in pools)
