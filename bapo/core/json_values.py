"""JSON of plain values, and of the numbers that numpy and pandas hand out in their place; maps of messages."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from bapo.core.errors import ContractError, Refusal

T = TypeVar("T")

MAX_LEVELS = 64
MAX_DEPTH = 32
"""Levels of maps and lists in a prompt's answer, the only part of a message that has any depth."""
_PLAIN = {str, bool, type(None)}
"""Types of which every value is plain."""
_KEYS = {str}
_LISTS = (list, tuple)
_NESTED = (dict, *_LISTS, Mapping)
_PLAIN_OF: tuple[tuple[type, Any], ...] = ((Mapping, dict), (str, str), (int, int), (float, float))
_LOWEST, _HIGHEST = -(1 << 63), (1 << 64) - 1


class Json(bytes):
    """Bytes that are JSON already."""

    __slots__ = ()


def plain_value(value: Any) -> Any:
    """What a numpy scalar, a map, or a text or number of a class of its own stands for, for encoders that know none.

    Raises: TypeError for anything else.
    """
    if isinstance(value, np.generic):
        return value.item()
    for base, plain in _PLAIN_OF:
        if isinstance(value, base):
            return plain(value)
    raise TypeError(f"{_type_of(value)} is not a JSON value")


def to_map(message: Any) -> dict[str, Any]:
    """A message as a map of plain values, for JSON or msgpack."""
    values: dict[str, Any] = msgspec.to_builtins(message, enc_hook=plain_value)
    return values


def from_map(values: Any, kind: type[T], what: str) -> T:
    """Inverse of `to_map`. Raises: ContractError that names the first field with another type or out of its bounds."""
    try:
        return msgspec.convert(values, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ContractError(f"{what}: {error}", Refusal.HEADER) from error


def require_plain(value: Any, what: str, depth: int = MAX_DEPTH) -> None:
    """Refuse what JSON and msgpack cannot both carry: other types, keys that are not text, integers beyond 64 bits,
    numbers that are not finite, and maps and lists inside each other beyond `depth` levels.

    Raises: ContractError.
    """
    if not isinstance(value, _NESTED):
        if problem := _foreign_value(value):
            raise ContractError(f"{what} contains {problem}", Refusal.HEADER)
        return
    if depth == 0:
        raise ContractError(f"{what} is nested deeper than {MAX_DEPTH} levels", Refusal.HEADER)
    items: Iterable[Any] = value
    if not isinstance(value, _LISTS):
        if not _KEYS.issuperset(map(type, value)):
            raise ContractError(f"{what} has keys that are not text: {list(value)!r:.100}", Refusal.HEADER)
        items = value.values()
    for item in items:
        kind = type(item)  # what most values are costs no call
        if kind not in _PLAIN and not (kind is int and _LOWEST <= item <= _HIGHEST):
            require_plain(item, what, depth - 1)


def _foreign_value(value: Any) -> str:
    """What a value is that JSON or msgpack has no word for; empty if both have one."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and not _LOWEST <= value <= _HIGHEST:
        return f"an integer of {value.bit_length()} bits, more than 64"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}, which is not JSON"
    return "" if isinstance(value, str | int | float | None) else f"a {_type_of(value)}, which is not JSON"


def to_json(value: Any, what: str) -> Json:
    """The value as JSON. Raises: ContractError that says where in `what` something else stands."""
    try:
        return Json(json.dumps(value, default=plain_value).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise ContractError(f"{what}: {_foreign(value) or error}") from error


def _foreign(value: Any, path: str = "", levels: int = MAX_LEVELS) -> str:
    """Where the first value stands that JSON has no word for; empty when none is found."""
    if isinstance(value, Mapping | list | tuple) and levels:
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        found = (_foreign(item, f"{path}.{key}" if path else str(key), levels - 1) for key, item in pairs)
        return next(filter(None, found), "")
    if levels == 0 or isinstance(value, str | int | float | None | np.generic):
        return ""
    hint = "; use its .tolist()" if hasattr(value, "tolist") else ""
    return f"{path} is {_type_of(value)}, which is not JSON serializable{hint}"


def _type_of(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
