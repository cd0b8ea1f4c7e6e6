"""One group: its responses with what the learner knew of every token, where a step recorded them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bapo.errors import ContractError
from bapo.token_files import TokenRow
from bapo.types import Fate
from bapo.web.prompt_index import PromptIndex
from bapo.web.steps import number
from bapo.web.view import RunView
from bapo.whatif.history import History, Visit

FOLDS = (PromptIndex, History)
TOKENS = 2000
"""Of each response, unless the caller wants more."""
EXPORTED_TOKENS = 300_000
"""Of all groups in an exported file: about 15 MB of it."""


def answer(view: RunView, *, id: str, step: int = 0, most: int = TOKENS) -> dict[str, Any]:
    """
    Args:
        step: which use of the group; 0: the newest one with a token record, else the newest.
        most: tokens of each response that are sent.
    Raises: ContractError for a group that no step looked at (yet: see `is_complete`).
    """
    found = view.fold(PromptIndex).group(id)
    if found is None:
        if view.is_complete:
            raise ContractError(f"no step of run {view.config.run.name} looked at a group {id[:80]!r}")
        return {"id": id, "responses": None}
    prompt_id, steps = found
    visits = [visit for visit in view.fold(History).visits(prompt_id) if visit.fate.group_id == id]
    recorded = set(view.run.token_files.steps())
    chosen = _chosen(visits, recorded, step)
    rows = view.run.token_files.read_group(chosen.step, chosen.fate.item or id) if chosen.step in recorded else []
    fate = chosen.fate
    return {
        "id": id,
        "prompt_id": prompt_id,
        "step": chosen.step,
        "steps": sorted(set(steps)),
        "origin": fate.origin.value if fate.origin else None,
        "reason": fate.reason,
        "why": chosen.sentence,
        "kind": chosen.kind,
        "version": fate.policy_version,
        "worker": fate.worker_id,
        "rewards": [number(reward) for reward in fate.rewards],
        "why_no_text": "" if rows else _why_no_text(view, fate, chosen.step, recorded),
        **_prompt(rows),
        "responses": [_response(row, max(0, most)) for row in rows],
    }


def exported(view: RunView) -> Iterable[dict[str, Any]]:
    """The groups of the newest recorded steps, as many as fit."""
    room = EXPORTED_TOKENS
    for step in reversed(view.run.token_files.steps()):
        sizes: dict[str, int] = {}
        for head in view.run.token_files.read_heads(step):
            sizes[head["group_id"]] = sizes.get(head["group_id"], 0) + min(TOKENS, head["num_tokens"])
        for group_id, size in sizes.items():
            room -= size
            if room < 0:
                return
            if view.fold(PromptIndex).group(group_id) is not None:
                yield {"id": group_id}
                yield {"id": group_id, "step": step}


def _chosen(visits: Sequence[Visit], recorded: set[int], step: int) -> Visit:
    for visit in visits:
        if visit.step == step:
            return visit
    with_text = [visit for visit in visits if visit.step in recorded and visit.fate.origin is not None]
    return (with_text or visits)[-1]


def _why_no_text(view: RunView, fate: Fate, step: int, recorded: set[int]) -> str:
    every = view.config.diagnostics.token_records
    if fate.origin is None:
        return "the group was not trained in this step, so the learner never saw its text; its rewards are all there is"
    if step in recorded:
        return (
            "the step's token record left this group out: diagnostics.token_records_mb is too small for the whole batch"
        )
    kept = (
        f"; its batch is kept, so `bapo replay RUN --step {step} --token-records` makes the record"
        if view.run.batch_path(step).is_file()
        else ""
    )
    if not every:
        return f"this run records no tokens: set diagnostics.token_records = 1 (every step) or more{kept}"
    if step % every == 0:
        return f"the token record of step {step} was removed: diagnostics.token_records_mb was full{kept}"
    return f"step {step} has no token record: diagnostics.token_records = {every} records every {every} steps{kept}"


def _prompt(rows: Sequence[TokenRow]) -> dict[str, Any]:
    if not rows:
        return {"prompt": None, "answer": None, "gold": None}
    return {"prompt": rows[0].prompt, "answer": dict(rows[0].answer), "gold": rows[0].gold}


def _response(row: TokenRow, most: int) -> dict[str, Any]:
    def numbers(values: Sequence[float] | None) -> list[Any] | None:
        return None if values is None else [number(value) for value in values[:most]]

    return {
        "row": row.row,
        "reward": number(row.reward),
        "outcome": row.outcome,
        "versions": [row.oldest_version, row.newest_version],
        "extracted": row.extracted,
        "advantage": number(row.advantage),
        "num_tokens": len(row.token_ids),
        "pieces": list(row.pieces[:most]),
        "rollout": numbers(row.rollout_logprobs),
        "logprobs": numbers(row.logprobs),
        "entropy": numbers(row.entropy),
        "ratio": numbers(row.ratio),
        "clipped": None if row.clipped is None else [int(value) for value in row.clipped[:most]],
    }
