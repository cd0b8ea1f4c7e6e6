"""Values as maps of plain values: how prompts and fates look inside a msgpack header or a JSON body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgpack

from bapo.errors import ContractError, Refusal
from bapo.frames import MOST_PROMPT_BYTES, require_plain
from bapo.types import Fate, Origin, Prompt, Purpose

_PROMPT_KEYS = set(Prompt.__struct_fields__)
_SELDOM_KEYS = {"item", "rows", "kind", "outcomes"}
_FATE_KEYS = {field.name for field in fields(Fate)} - _SELDOM_KEYS
_FATE_TEXTS = ("group_id", "prompt_id", "reason", "worker_id")
_FATE_COUNTS = ("policy_version", "birth", "num_tokens")
_FATE_SECONDS = ("sample_s", "grade_s", "claimed_at")


def purpose_word(purpose: Purpose) -> str:
    """How a purpose travels. Raises: ContractError for what is none."""
    try:
        return Purpose(purpose).value  # the word itself will do
    except ValueError as error:
        known = ", ".join(Purpose)
        raise ContractError(f"the purpose {purpose!r} is none of {known}", Refusal.HEADER) from error


def prompt_map(prompt: Prompt) -> dict[str, Any]:
    """A prompt as a map. Raises: ContractError for an answer that is no map."""
    if not isinstance(prompt.answer, Mapping):
        found = type(prompt.answer).__name__
        raise ContractError(
            f"prompt {prompt.prompt_id}: the answer is a map, for example {{'answer': '42'}}, got {found}; {{}} if "
            "there is none",
            Refusal.HEADER,
        )
    return {
        "prompt_id": prompt.prompt_id,
        "text": prompt.text,
        "task": prompt.task,
        "answer": dict(prompt.answer),
    }


def require_carried(prompt: Prompt) -> None:
    """Refuse a prompt that the buffer or a group's header would refuse, hours later and without its place in a file.

    Raises: ContractError.
    """
    require_answer(prompt.answer)
    try:
        size = len(msgpack.packb(prompt_map(prompt)))
    except (TypeError, ValueError, OverflowError) as error:  # halves of characters; integers beyond 64 bits
        raise ContractError(f"it cannot be packed: {error}", Refusal.HEADER) from error
    if size > MOST_PROMPT_BYTES:
        raise ContractError(
            f"it takes {size} bytes with its answer and columns; at most {MOST_PROMPT_BYTES} travel with a group",
            Refusal.HEADER,
        )


def prompt_from_map(values: Mapping[str, Any]) -> Prompt:
    """A prompt from its map. Raises: ContractError."""
    if not isinstance(values, dict) or values.keys() != _PROMPT_KEYS:
        raise ContractError(f"prompt has the keys {sorted(map(str, values))}", Refusal.HEADER)
    prompt_id, text, task, answer = values["prompt_id"], values["text"], values["task"], values["answer"]
    if not (isinstance(prompt_id, str) and isinstance(text, str) and isinstance(task, str)):
        raise ContractError("prompt_id, text and task must be strings", Refusal.HEADER)
    return Prompt(prompt_id=prompt_id, text=text, task=task, answer=require_answer(answer))


def require_answer(answer: Any) -> dict[str, Any]:
    """What a prompt's answer may be: a map of plain values. Raises: ContractError for anything else."""
    if not isinstance(answer, dict):
        raise ContractError("a prompt's answer must be a map", Refusal.HEADER)
    require_plain(answer, "a prompt's answer")
    return answer


def fate_map(fate: Fate) -> dict[str, Any]:
    """A fate as a map."""
    # Field by field, as a fate is made thousands of times: dataclasses.asdict would be most of an assembly's time.
    return {
        "group_id": fate.group_id,
        "prompt_id": fate.prompt_id,
        "purpose": fate.purpose.value,
        "policy_version": fate.policy_version,
        "rewards": list(fate.rewards),
        "origin": fate.origin.value if fate.origin else None,
        "reason": fate.reason,
        "birth": fate.birth,
        "worker_id": fate.worker_id,
        "num_tokens": fate.num_tokens,
        "sample_s": fate.sample_s,
        "grade_s": fate.grade_s,
        "claimed_at": fate.claimed_at,
        **_seldom(fate),
    }


def _seldom(fate: Fate) -> dict[str, Any]:
    """What only a group that trains in parts has, or one with a truncated or an expert's row: headers stay short."""
    rows = None if fate.rows is None else list(fate.rows)
    parts = {"item": fate.item, "rows": rows, "kind": fate.kind} if fate.item else {}
    return parts | ({"outcomes": list(fate.outcomes)} if fate.outcomes else {})


def fate_from_map(values: Mapping[str, Any]) -> Fate:
    """Inverse of `fate_map`. Raises: ContractError."""
    if not isinstance(values, Mapping) or set(values) - _SELDOM_KEYS != _FATE_KEYS:
        raise ContractError(f"a fate must be a map with the keys {sorted(_FATE_KEYS)}, got {values!r}")
    for names, kinds in ((_FATE_TEXTS, str), (_FATE_COUNTS, int), (_FATE_SECONDS, (int, float))):
        for name in names:
            if not isinstance(values[name], kinds):
                raise ContractError(f"a fate's {name} is {values[name]!r}")
    try:
        purpose = Purpose(values["purpose"])
        origin = None if values["origin"] is None else Origin(values["origin"])
        rewards = tuple(float(r) for r in values["rewards"])
        rows = None if values.get("rows") is None else tuple(int(row) for row in values["rows"])
        outcomes = bytes(list(values.get("outcomes", ())))
    except (TypeError, ValueError) as error:
        raise ContractError(f"a fate has a wrong purpose, origin or reward: {error}") from error
    return Fate(
        **{**values, "purpose": purpose, "origin": origin, "rewards": rewards, "rows": rows, "outcomes": outcomes}
    )
