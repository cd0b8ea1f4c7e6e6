"""Words in the ids of prompts and groups, and in the texts of those whose tokens are recorded."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from bapo.errors import ContractError
from bapo.web.prompt_index import Texts
from bapo.web.view import RunView

FOLDS = (Texts,)
LIMIT = 50
TAKE_S = 0.08
"""Longest time that one answer reads token records; at least one file is read."""
MOST_CHARS = 20_000
"""Of one text."""


def answer(view: RunView, *, text: str) -> dict[str, Any]:
    """The newest prompts, groups and responses that have all words; call again while `is_whole` is false.

    Answers: `hits`: {kind: prompt, group or response, id, step, row, snippet}; `has_all`: whether these are all;
    `taken` of `recorded` steps are in the index so far.
    """
    if len(text) > 200:
        raise ContractError(f"a search of {len(text)} characters; at most 200 are taken")
    texts, steps = view.fold(Texts), view.run.token_files.steps()
    take(view, texts, steps)
    hits, has_all = texts.index.find(text, LIMIT)
    return {
        "text": text,
        "hits": [_hit(*hit.key, snippet=hit.snippet) for hit in hits],
        "has_all": has_all,
        "is_whole": texts.taken.issuperset(steps),
        "taken": len(texts.taken.intersection(steps)),
        "recorded": len(steps),
        "is_full": texts.index.is_full,
    }


def exported(_: RunView) -> Iterable[dict[str, Any]]:
    """None: an exported file answers no free questions."""
    return []


def take(view: RunView, texts: Texts, steps: list[int]) -> None:
    """Add the token records that are new to the index, for at most TAKE_S."""
    deadline = time.monotonic() + TAKE_S
    for step in steps:
        if step in texts.taken:
            continue
        for head in view.run.token_files.read_heads(step):
            # An entry of several stored groups ("a:0,2+b:1") is found under the first of them.
            group_id, prompt_id = head["group_id"].split("+")[0].split(":")[0], head["prompt_id"]
            if prompt_id not in texts.prompts:
                texts.prompts[prompt_id] = head["prompt"][:MOST_CHARS]
                texts.index.add(("prompt", prompt_id, step), texts.prompts[prompt_id])
            texts.index.add(("response", group_id, step, head["row"]), head["text"][:MOST_CHARS])
        texts.taken.add(step)
        if time.monotonic() > deadline:
            return


def _hit(kind: str | int, name: str | int, step: str | int, row: str | int = 0, *, snippet: str) -> dict[str, Any]:
    return {"kind": kind, "id": name, "step": step, "row": row, "snippet": snippet}
