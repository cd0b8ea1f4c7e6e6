"""JSON of plain values, and of the numbers that numpy and pandas hand out in their place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from bapo.core.errors import ContractError

MAX_LEVELS = 64


class Json(bytes):
    """Bytes that are JSON already."""

    __slots__ = ()


def plain_number(value: Any) -> Any:
    """What a numpy scalar stands for, for encoders that know none. Raises: TypeError for anything else."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{_type_of(value)} is not a JSON value")


def to_json(value: Any, what: str) -> Json:
    """The value as JSON. Raises: ContractError that says where in `what` something else stands."""
    try:
        return Json(json.dumps(value, default=plain_number).encode())
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
