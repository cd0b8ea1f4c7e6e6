"""The prompts of a run: an index of prompts and groups, the list of prompts, and one prompt with all its visits.

First and last refer to fresh groups of G sampled responses, as in the accuracy-migration matrix (Fig. 15), so that a
cell of the matrix links to the list of its prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from bapo.algorithms.composers.registry import load_composer
from bapo.config.tree import Config
from bapo.core.errors import ContractError
from bapo.core.types import Purpose, num_correct, num_sampled, sampled_rewards
from bapo.runtime.run_directory.recording import RecordedStep
from services.dashboard.history import History, Visit
from services.dashboard.run_view import RunView, number

LIMIT = 100
MAX_OFFSET = 1 << 31
TABLES = ("", "bad", "high")
EXPORTED = 300
"""Number of prompts in an exported file: the last seen ones."""


@dataclass(slots=True)
class Summary:
    prompt_id: str
    fresh: list[tuple[int, int]] = field(default_factory=list)
    """(step, k) of the fresh groups of G responses."""
    num_visits: int = 0
    num_trained: int = 0
    first_step: int = 0
    last_step: int = 0

    def moved(self, until: int = 0) -> tuple[int, int] | None:
        """k of its first and last fresh group up to a step (0: all), if there are at least two."""
        found = [k for step, k in self.fresh if not until or step <= until]
        return (found[0], found[-1]) if len(found) > 1 else None


class PromptIndex:
    """Prompts in order of appearance, and the steps of every group."""

    def __init__(self, config: Config) -> None:
        self._size = config.algorithm.sampled_size
        self._prompts: dict[str, Summary] = {}
        self._groups: dict[str, tuple[str, list[int]]] = {}

    def advance(self, step: RecordedStep) -> None:
        seen: set[str] = set()
        for result in step.results:
            found = self._prompts.setdefault(result.prompt_id, Summary(result.prompt_id, first_step=step.step))
            found.last_step = step.step
            found.num_trained += result.origin is not None
            places = self._groups.setdefault(result.group_id, (result.prompt_id, []))[1]
            if result.group_id in seen:  # several items of the batch contain it
                continue
            seen.add(result.group_id)
            places.append(step.step)
            found.num_visits += 1
            if result.purpose is Purpose.FRESH and result.birth == step.step and num_sampled(result) == self._size:
                found.fresh.append((step.step, num_correct(sampled_rewards(result))))

    def prompts(self) -> Iterator[Summary]:
        """All prompts, last seen first."""
        return iter(sorted(self._prompts.values(), key=lambda found: -found.last_step))

    def group(self, group_id: str) -> tuple[str, list[int]] | None:
        """(prompt, steps that read it); None for an unknown group."""
        return self._groups.get(group_id)


def prompts(
    view: RunView, *, first: int = -1, last: int = -1, until: int = 0, table: str = "", offset: int = 0
) -> dict[str, Any]:
    """List prompts: all, those of one cell of the migration matrix, or those in a table.

    Last seen first; at most 100 after the first `offset` ones.

    Args:
        first, last: k of the first and last fresh group, for prompts that have at least two; -1: any.
        until: last step to consider; 0: all.
        table: bad or high: prompts currently in it.
    Raises: ContractError for an unknown table or an invalid offset.
    """
    if table not in TABLES or not 0 <= offset < MAX_OFFSET:
        raise ContractError(
            f"table={table!r:.40}, offset={offset}: table must be bad, high or empty, offset in [0, {MAX_OFFSET - 1}]"
        )
    index, history = view.fold(PromptIndex), view.fold(History)
    chosen = [found for found in index.prompts() if _has_moved(found, first, last, until)]
    if table:
        names = history.tables_now()[table]
        chosen = [found for found in chosen if found.prompt_id in names]
    return {
        "total": len(chosen),
        "offset": offset,
        "differs": history.differs,
        "group_size": view.config.algorithm.sampled_size,
        "prompts": [_row(found) for found in islice(chosen, offset, offset + LIMIT)],
    }


def exported_prompts(view: RunView) -> Iterable[dict[str, Any]]:
    cells = {cell for found in view.fold(PromptIndex).prompts() if (cell := found.moved())}
    num = sum(1 for _ in view.fold(PromptIndex).prompts())
    return [
        {},
        *({"offset": offset} for offset in range(LIMIT, min(num, EXPORTED), LIMIT)),
        *({"table": table} for table in TABLES[1:]),
        *({"first": first, "last": last} for first, last in sorted(cells)),
    ]


def _has_moved(found: Summary, first: int, last: int, until: int) -> bool:
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


def prompt(view: RunView, *, id: str) -> dict[str, Any]:
    """One prompt: every visit with its reason, and when and why it entered and left each table.

    Raises: ContractError for a prompt that no assembly has read (yet: see `is_complete`)."""
    history = view.fold(History)
    visits = history.visits(id)
    if not visits and view.is_complete:
        raise ContractError(f"no step of run {view.config.run.name} has read a prompt {id[:80]!r}")
    files = view.run.token_files
    recorded = set(files.steps())
    return {
        "id": id,
        "c1": view.config.algorithm.c1 if "c1" in load_composer(view.config.algorithm).decides_by else None,
        "differs": history.differs,
        "visits": [_visit(visit, visit.step in recorded and files.has(visit.step, visit.item)) for visit in visits],
        "transitions": [
            {"step": event.step, "table": event.table, "change": event.change, "why": event.sentence}
            for event in history.transitions(id)
        ],
    }


def exported_prompt(view: RunView) -> Iterable[dict[str, Any]]:
    return [{"id": found.prompt_id} for found in islice(view.fold(PromptIndex).prompts(), EXPORTED)]


def _visit(visit: Visit, has_text: bool) -> dict[str, Any]:
    result = visit.result
    return {
        "step": visit.step,
        "kind": visit.kind,
        "group": result.group_id,
        "item": visit.item,
        "version": result.policy_version,
        "asked": visit.asked,
        "birth": result.birth,
        "k": number(visit.stat.reward_sum),
        "size": visit.stat.size,
        "mu": number(visit.stat.mu),
        "rewards": [number(reward) for reward in result.rewards],
        "origin": result.origin.value if result.origin else None,
        "reason": result.reason,
        "why": visit.sentence,
        "has_text": has_text,
    }
