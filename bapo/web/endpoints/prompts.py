"""The prompts of a run: all of them, those of one cell of the migration matrix, or those in a table."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from bapo.errors import ContractError
from bapo.web.prompt_index import PromptIndex, Summary
from bapo.web.view import RunView
from bapo.whatif.history import History

FOLDS = (PromptIndex, History)
LIMIT = 100
MOST_OFFSET = 1 << 31
TABLES = ("", "bad", "high")


def answer(
    view: RunView, *, first: int = -1, last: int = -1, until: int = 0, table: str = "", offset: int = 0
) -> dict[str, Any]:
    """Prompts, the one that was looked at last first; at most 100 behind the first `offset` ones.

    Args:
        first, last: k of the first and of the last fresh group, of prompts that have at least two; -1: any.
        until: the step up to which that is meant; 0: all.
        table: bad or high: those that are in it now.
    Raises: ContractError for another table, or an offset that no list has.
    """
    if table not in TABLES or not 0 <= offset < MOST_OFFSET:
        raise ContractError(
            f"table={table!r:.40}, offset={offset}: table is bad, high or empty, and offset from 0 to {MOST_OFFSET - 1}"
        )
    index, history = view.fold(PromptIndex), view.fold(History)
    chosen = [found for found in index.prompts() if _moved(found, first, last, until)]
    if table:
        names = history.tables_now()[table]
        chosen = [found for found in chosen if found.prompt_id in names]
    return {
        "total": len(chosen),
        "offset": offset,
        "differs": history.differs,
        "group_size": view.config.algorithm.group_size,
        "prompts": [_row(found) for found in islice(chosen, offset, offset + LIMIT)],
    }


def exported(view: RunView) -> Iterable[dict[str, Any]]:
    """The newest prompts, and every cell of the matrix that has any."""
    cells = {cell for found in view.fold(PromptIndex).prompts() if (cell := found.moved())}
    return [
        {},
        *({"table": table} for table in TABLES[1:]),
        *({"first": first, "last": last} for first, last in sorted(cells)),
    ]


def _moved(found: Summary, first: int, last: int, until: int) -> bool:
    if first < 0 and last < 0:
        return True
    moved = found.moved(until)
    return moved is not None and first in (-1, moved[0]) and last in (-1, moved[1])


def _row(found: Summary) -> dict[str, Any]:
    return {
        "id": found.prompt_id,
        "first": found.fresh[0][1] if found.fresh else None,
        "last": found.fresh[-1][1] if found.fresh else None,
        "visits": found.num_visits,
        "trained": found.num_trained,
        "first_step": found.first_step,
        "last_step": found.last_step,
    }
