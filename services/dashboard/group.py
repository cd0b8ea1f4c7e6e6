"""One group: its responses, with per-token values of the learner if they were recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bapo.core.errors import ContractError
from bapo.core.reward_details import as_columns
from bapo.core.types import GroupResult
from bapo.runtime.run_directory.responses import TokenFiles, TokenRow
from bapo.runtime.run_directory.transcripts import CHARS, fork_of
from services.dashboard.history import History, Visit
from services.dashboard.prompts import PromptIndex
from services.dashboard.run_view import RunView, number

TOKENS = 2000
EXPORTED_TOKENS = 300_000
"""Token limit of all groups in an exported file: about 15 MB."""


def group(view: RunView, *, id: str, step: int = 0, most: int = TOKENS) -> dict[str, Any]:
    """One group with its responses.

    Args:
        step: which use of the group; 0: the latest with a text, preferably one that trained; else the latest.
        most: maximum number of tokens per response.
    Raises: ContractError for a group that no step has read (yet: see `is_complete`).
    """
    found = view.fold(PromptIndex).group(id)
    if found is None:
        if view.is_complete:
            raise ContractError(f"no step of run {view.config.run.name} has read a group {id[:80]!r}")
        return {"id": id, "responses": None}
    prompt_id, steps = found
    visits = [visit for visit in view.fold(History).visits(prompt_id) if visit.result.group_id == id]
    chosen, rows = _chosen(view.run.token_files, visits, step)
    result = chosen.result
    return {
        "id": id,
        "prompt_id": prompt_id,
        "step": chosen.step,
        "steps": sorted(set(steps)),
        "origin": result.origin.value if result.origin else None,
        "reason": result.reason,
        "why": chosen.sentence,
        "kind": chosen.kind,
        "version": result.policy_version,
        "worker": result.worker_id,
        "rewards": [number(reward) for reward in result.rewards],
        "why_no_text": "" if rows else _why_no_text(view, result, chosen.step),
        "why_no_tokens": _why_no_tokens(view, result, chosen.step) if rows and rows[0].is_text_alone else "",
        **_prompt(rows),
        "most": most,
        "responses": [_response(row, max(0, most)) for row in rows],
    }


def exported_group(view: RunView) -> Iterable[dict[str, Any]]:
    """The groups of the latest recorded steps, as many as fit."""
    room = EXPORTED_TOKENS
    for step in reversed(view.run.token_files.steps()):
        sizes: dict[str, int] = {}
        for head in view.run.token_files.read_heads(step):
            sizes[head["group_id"]] = sizes.get(head["group_id"], 0) + min(TOKENS, head["num_shown"])
        for group_id, size in sizes.items():
            room -= size
            if room < 0:
                return
            if view.fold(PromptIndex).group(group_id) is not None:
                yield {"id": group_id}
                yield {"id": group_id, "step": step}


def _chosen(files: TokenFiles, visits: Sequence[Visit], step: int) -> tuple[Visit, list[TokenRow]]:
    for visit in visits:
        if visit.step == step:
            return visit, _rows(files, visit)
    trained_last = sorted(visits, key=lambda visit: (visit.result.origin is not None, visit.step))
    for visit in reversed(trained_last):
        if rows := _rows(files, visit):
            return visit, rows
    return visits[-1], []


def _rows(files: TokenFiles, visit: Visit) -> list[TokenRow]:
    return files.read_group(visit.step, visit.item)


def _why_no_text(view: RunView, result: GroupResult, step: int) -> str:
    settings, steps = view.config.diagnostics, view.run.token_files.steps()
    kept = "" if result.origin is None else _kept_batch(view, step)
    if step in steps and result.origin is None:
        return (
            "the step has texts, but not of this group: groups that do not train are kept up to the limit of "
            f"diagnostics.texts_mb = {settings.texts_mb}"
        )
    if step in steps:
        return (
            "the texts of this step do not include this group: diagnostics.texts_mb or diagnostics.token_records_mb is "
            "too small for the whole batch"
        )
    if not settings.texts and not settings.token_records:
        return f"this run records no texts: set diagnostics.texts to 1 (every step) or more{kept}"
    if all(not every or step % every for every in (settings.texts, settings.token_records)):
        turns = f"diagnostics.texts = {settings.texts}, diagnostics.token_records = {settings.token_records}"
        return f"step {step} is not recorded ({turns}; 0: never){kept}"
    if steps and step < steps[0]:
        return f"the texts of step {step} were deleted: diagnostics.token_records_mb was exceeded{kept}"
    return (
        f"the texts of step {step} are not written yet, or were skipped (see the learner's log); older "
        f"runs recorded none{kept}"
    )


def _why_no_tokens(view: RunView, result: GroupResult, step: int) -> str:
    if result.origin is None:
        return "the group did not train in this step, so there are no token values"
    every = view.config.diagnostics.token_records
    setting = (
        f"diagnostics.token_records = {every} records every {every} steps" if every else "diagnostics.token_records = 0"
    )
    return f"this step has no token record ({setting}){_kept_batch(view, step)}"


def _kept_batch(view: RunView, step: int) -> str:
    if not view.run.batch_path(step).is_file():
        return ""
    return f"; its batch is stored: create the record with `bapo replay RUN --step {step} --token-records`"


def _prompt(rows: Sequence[TokenRow]) -> dict[str, Any]:
    if not rows:
        return {"prompt": None, "engine_prompt": None, "images": [], "answer": None, "gold": None}
    first = rows[0]
    return {
        "prompt": first.prompt,
        "engine_prompt": first.engine_prompt,
        "images": list(first.images),
        "answer": dict(first.answer),
        "gold": first.gold,
    }


def _response(row: TokenRow, most: int) -> dict[str, Any]:
    rollout = None if row.rollout_logprobs is None else row.rollout_logprobs[:most]
    pieces = _within(row.pieces, most * CHARS) if row.is_text_alone else list(row.pieces[:most])
    turns = _turns(row, len(pieces), most)
    shown = [*pieces, *(turn["context"] for turn in turns)]
    whole = [*row.pieces, *(turn.context for turn in row.turns)]

    def numbers(values: Sequence[float] | None) -> list[Any] | None:
        return None if values is None else [number(value) for value in values[:most]]

    return {
        "row": row.row,
        "reward": number(row.reward),
        **as_columns(row.reward_details),
        "outcome": row.outcome,
        "versions": [row.oldest_version, row.newest_version],
        "extracted": row.extracted,
        "advantage": None if row.advantage is None else number(row.advantage),
        "num_tokens": len(row.token_ids),
        "pieces": pieces,
        "turns": turns or None,
        "num_turns": max(1, len(row.turns)),
        "is_cut": sum(map(len, shown)) < sum(map(len, whole)),
        "rollout": numbers(rollout),
        "logprobs": numbers(row.logprobs),
        "entropy": numbers(row.entropy),
        "ratio": numbers(row.ratio),
        "clipped": None if row.clipped is None else [int(value) for value in row.clipped[:most]],
    }


def _turns(row: TokenRow, num_pieces: int, most: int) -> list[dict[str, Any]]:
    """The turns of which a piece is shown; empty for a response of one turn. `num_pieces`: of each turn, shown."""
    contexts = _within([turn.context for turn in row.turns], most * CHARS)
    found, start = list[dict[str, Any]](), 0
    for number_, (turn, pieces) in enumerate(zip(row.turns, row.pieces_of_turns, strict=False)):
        if start >= num_pieces:
            break
        found.append({
            "num_tokens": turn.num_tokens,
            "num_pieces": min(len(pieces), num_pieces - start),
            "fork": fork_of(number_, turn.parent),
            "context": contexts[number_] if number_ < len(contexts) else "",
        })  # fmt: skip
        start += len(pieces)
    return found


def _within(texts: Sequence[str], room: int) -> list[str]:
    """The texts up to a number of characters together, the last one cut."""
    found: list[str] = []
    for text in texts:
        if room <= 0 and text:
            break
        found.append(text[:room])
        room -= len(found[-1])
    return found
