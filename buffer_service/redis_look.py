"""What an assembly looks at before it decides, each look in one moment of Redis.

Transactions of plain commands: a script would pass the values on through Lua, and takes some 60 us to begin when
its code is not in the processor's caches, which at a low rate it never is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bapo.errors import UnavailableError
from buffer_service.redis_keys import Keys
from buffer_service.redis_link import RESTORING, RedisLink
from buffer_service.values import Readiness


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What there is, by its ids."""

    assembled: int
    tables: bytes
    fresh: Sequence[bytes]
    reevaluated: Sequence[bytes]
    stale: Sequence[bytes]
    """Packed fates."""


def readiness_of(link: RedisLink, keys: Keys, step: int) -> Readiness:
    """See `Store.readiness`."""
    meta, num_fresh, left, num_open = link.at_once(
        ("HMGET", keys["meta"], "restoring", "assembled", "failures_in_a_row", "last_failure", "fresh_bytes"),
        ("ZCARD", keys["fresh"]),
        ("HGET", keys["rounds"], step),
        ("ZCOUNT", keys["planned"], "-inf", step),
    )
    assembled, failures, reason, fresh_bytes = _unless_restoring(meta)
    return Readiness(
        assembled=int(assembled or 0),
        num_fresh=num_fresh,
        round_left=None if left is None else int(left),
        failures_in_a_row=int(failures or 0),
        last_failure=(reason or b"").decode(),
        num_open=num_open,
        fresh_bytes=int(fresh_bytes or 0),
    )


def look_at(link: RedisLink, keys: Keys, num_fresh: int) -> Look:
    """The first `num_fresh` fresh groups, and all of the rest."""
    meta, tables, fresh, reevaluated, stale = link.at_once(
        ("HMGET", keys["meta"], "restoring", "assembled"),
        ("GET", keys["tables"]),
        ("ZRANGE", keys["fresh"], *((0, num_fresh - 1) if num_fresh else (1, 0))),
        ("ZRANGE", keys["reevaluated"], 0, -1),
        ("LRANGE", keys["stale"], 0, -1),
    )
    (assembled,) = _unless_restoring(meta)
    return Look(assembled=int(assembled or 0), tables=tables or b"", fresh=fresh, reevaluated=reevaluated, stale=stale)


def _unless_restoring(meta: Sequence[bytes | None]) -> Sequence[bytes | None]:
    """What follows the first of these, which is `restoring`. Raises: UnavailableError."""
    if meta[0] is not None:
        raise UnavailableError(RESTORING)
    return meta[1:]
