"""The reference vectors (tests/support/vectors.json), for tests to read their expected values from."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any


def vector(name: str, *keys: str) -> Any:
    """What the file has under these keys; a copy."""
    found = _file()[name]
    for key in keys:
        found = found[key]
    return copy.deepcopy(found)


def tokens(rows: Sequence[Sequence[float]]) -> list[float]:
    """The two padded rows of V2 to V5 and V12, of 3 and 2 tokens, one after the other."""
    return [*rows[0][:3], *rows[1][:2]]


@cache
def _file() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("vectors.json").read_text(encoding="utf-8"))
    return found
