"""What HTTP services of ours say of a request that they refuse: the same words, whichever of them it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bapo.errors import BY_NAME, BapoError

MOST_PROBLEMS = 3


def name_of(error: BapoError) -> str:
    """By which a client knows it: of its class, or of the nearest above it that clients know."""
    return next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in BY_NAME)


def wrong_fields(method: str, path: str, errors: Sequence[Mapping[str, Any]]) -> str:
    """The first `errors` of pydantic's, with their places."""
    problems = [f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in errors[:MOST_PROBLEMS]]
    return f"{method} {path}: {'; '.join(problems)}"


def no_route(method: str, path: str, detail: str) -> str:
    """Neither this path nor this method of it is there."""
    return f"{method} {path}: {detail}; the API is described at /docs"
