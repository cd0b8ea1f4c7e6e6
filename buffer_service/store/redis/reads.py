"""Consistent reads that fail during a restore, and the reads of an assembly.

Transactions of plain commands: a script would copy the values through Lua, and takes about 60 us to start while its
code is not in the CPU caches, which is always the case at a low rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from buffer_service.state import Readiness
from buffer_service.store.redis.connection import Arg, RedisLink
from buffer_service.store.redis.errors import RESTORING, RestoringError
from buffer_service.store.redis.keys import Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Raw values of a step reading, by id."""

    ready: Readiness
    tables: bytes
    fresh: Sequence[bytes]
    reevaluated: Sequence[bytes]
    stale: Sequence[bytes]
    """Packed results."""


def read(link: RedisLink, keys: Keys, *commands: Sequence[Arg], written: bool = False) -> list[Any]:
    """Replies of one transaction. Raises: RestoringError while a restore is in progress or was interrupted.

    `written` as for `RedisLink.at_once`.
    """
    restoring, *found = link.at_once(("HEXISTS", keys["meta"], "restoring"), *commands, written=written)
    if restoring:
        raise RestoringError(RESTORING)
    return found


def read_readiness(link: RedisLink, keys: Keys, step: int) -> Readiness:
    """Whether step `step` can be assembled."""
    return _readiness(link.at_once(*_questions(keys, step)))


def read_step(link: RedisLink, keys: Keys, step: int, num_fresh: int) -> Found:
    """Read the first `num_fresh` fresh groups, and everything else completely."""
    *numbers, tables, fresh, reevaluated, stale = link.at_once(
        *_questions(keys, step),
        ("GET", keys["tables"]),
        ("ZRANGE", keys["fresh"], *((0, num_fresh - 1) if num_fresh else (1, 0))),
        ("ZRANGE", keys["reevaluated"], 0, -1),
        ("LRANGE", keys["stale"], 0, -1),
    )
    ready = _readiness(numbers)
    return Found(ready=ready, tables=tables or b"", fresh=fresh, reevaluated=reevaluated, stale=stale)


def _questions(keys: Keys, step: int) -> Sequence[Sequence[Arg]]:
    return (
        ("HMGET", keys["meta"], "restoring", "assembled", "failures_in_a_row", "last_failure", "fresh_bytes"),
        ("ZCARD", keys["fresh"]),
        ("HGET", keys["rounds"], step),
        ("ZCOUNT", keys["planned"], "-inf", step),
    )


def _readiness(answers: Sequence[Any]) -> Readiness:
    """Raises: RestoringError."""
    (restoring, assembled, failures, reason, fresh_bytes), num_fresh, left, num_open = answers
    if restoring is not None:
        raise RestoringError(RESTORING)
    return Readiness(
        assembled=int(assembled or 0),
        num_fresh=num_fresh,
        round_left=None if left is None else int(left),
        failures_in_a_row=int(failures or 0),
        last_failure=(reason or b"").decode(),
        num_open=num_open,
        fresh_bytes=int(fresh_bytes or 0),
    )
