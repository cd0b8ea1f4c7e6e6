"""Values as maps of plain values: how prompts and fates look inside a msgpack header or a JSON body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from bapo.errors import ContractError
from bapo.types import Fate, Origin, Prompt, Purpose

_FATE_FIELDS = tuple(field.name for field in fields(Fate))
_FATE_KEYS = set(_FATE_FIELDS)
_FATE_TEXTS = ("group_id", "prompt_id", "reason", "worker_id")
_FATE_COUNTS = ("policy_version", "birth", "num_tokens")
_FATE_SECONDS = ("sample_s", "grade_s", "claimed_at")


def prompt_map(prompt: Prompt) -> dict[str, Any]:
    """A prompt as a map."""
    return {
        "prompt_id": prompt.prompt_id,
        "text": prompt.text,
        "task": prompt.task,
        "answer": dict(prompt.answer),
    }


def prompt_from_map(values: Mapping[str, Any]) -> Prompt:
    """A prompt from its map. Raises: ContractError."""
    if set(values) != {"prompt_id", "text", "task", "answer"}:
        raise ContractError(f"prompt has the keys {sorted(map(str, values))}")
    if not all(isinstance(values[key], str) for key in ("prompt_id", "text", "task")):
        raise ContractError("prompt_id, text and task must be strings")
    if not isinstance(values["answer"], dict):
        raise ContractError("a prompt's answer must be a map")
    return Prompt(**values)


def fate_map(fate: Fate) -> dict[str, Any]:
    """A fate as a map."""
    # Not dataclasses.asdict, whose deep copies are most of the time that the assembly of a batch takes.
    values = {name: getattr(fate, name) for name in _FATE_FIELDS}
    values["purpose"] = fate.purpose.value
    values["origin"] = fate.origin.value if fate.origin else None
    values["rewards"] = list(fate.rewards)
    return values


def fate_from_map(values: Mapping[str, Any]) -> Fate:
    """Inverse of `fate_map`. Raises: ContractError."""
    if not isinstance(values, Mapping) or set(values) != _FATE_KEYS:
        raise ContractError(f"a fate must be a map with the keys {sorted(_FATE_KEYS)}, got {values!r}")
    for names, kinds in ((_FATE_TEXTS, str), (_FATE_COUNTS, int), (_FATE_SECONDS, (int, float))):
        for name in names:
            if not isinstance(values[name], kinds):
                raise ContractError(f"a fate's {name} is {values[name]!r}")
    try:
        purpose = Purpose(values["purpose"])
        origin = None if values["origin"] is None else Origin(values["origin"])
        rewards = tuple(float(r) for r in values["rewards"])
    except (TypeError, ValueError) as error:
        raise ContractError(f"a fate has a wrong purpose, origin or reward: {error}") from error
    return Fate(**{**values, "purpose": purpose, "origin": origin, "rewards": rewards})
