"""One prompt: every visit with the inequality that decided, and when it entered and left each table and why."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from bapo.errors import ContractError
from bapo.web.prompt_index import PromptIndex
from bapo.web.steps import number
from bapo.web.view import RunView
from bapo.whatif.history import History, Visit

FOLDS = (PromptIndex, History)
EXPORTED = 300
"""Prompts that an exported file carries: those that were looked at last."""


def answer(view: RunView, *, id: str) -> dict[str, Any]:
    """Raises: ContractError for a prompt that no assembly saw (yet: see `is_complete`)."""
    history = view.fold(History)
    visits = history.visits(id)
    if not visits and view.is_complete:
        raise ContractError(f"no step of run {view.config.run.name} looked at a prompt {id[:80]!r}")
    files = view.run.token_files
    recorded = set(files.steps())
    return {
        "id": id,
        "c1": view.config.algorithm.c1,
        "differs": history.differs,
        "visits": [_visit(visit, visit.step in recorded and files.has(visit.step, visit.item)) for visit in visits],
        "transitions": [
            {"step": event.step, "table": event.table, "change": event.change, "why": event.sentence}
            for event in history.transitions(id)
        ],
    }


def exported(view: RunView) -> Iterable[dict[str, Any]]:
    """The prompts that were looked at last."""
    return [{"id": found.prompt_id} for found in islice(view.fold(PromptIndex).prompts(), EXPORTED)]


def _visit(visit: Visit, has_text: bool) -> dict[str, Any]:
    fate = visit.fate
    return {
        "step": visit.step,
        "kind": visit.kind,
        "group": fate.group_id,
        "item": visit.item,
        "version": fate.policy_version,
        "asked": visit.asked,
        "birth": fate.birth,
        "k": number(visit.stat.reward_sum),
        "size": visit.stat.size,
        "mu": number(visit.stat.mu),
        "rewards": [number(reward) for reward in fate.rewards],
        "origin": fate.origin.value if fate.origin else None,
        "reason": fate.reason,
        "why": visit.sentence,
        "has_text": has_text,
    }
