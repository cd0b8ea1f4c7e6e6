"""The facts of one run in Redis: the index in one transaction, then the frames' sizes, each beside its reference.

A group may be pushed or deleted between the two. Those that the index did not have are left to the next audit; one
that is gone by the time its frame is looked at counts as whole, because its record was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from bapo.errors import UnavailableError
from bapo.types import Purpose
from buffer_service.audit import Audit, OpenFacts
from buffer_service.codec import unpack_batch_record, unpack_fate, unpack_record, unpack_tables
from buffer_service.redis_keys import Keys, reference_count
from buffer_service.redis_link import RedisLink

HASHES = (
    "meta", "records", "refs", "batches", "live", "holders", "held", "rounds", "evaluations", "requests", "bad_prompts",
)  # fmt: skip
SETS = ("fresh", "reevaluated", "evaluated", "done", "planned")
GROUPS_AT_ONCE = 500
SCANNED_AT_ONCE = 1000


def read_audit(link: RedisLink, keys: Keys) -> Audit:
    """O(what the buffer holds); blocks Redis for about as long as a snapshot's index does."""
    pipe = link.client.pipeline(transaction=True)
    for name in HASHES:
        pipe.hgetall(keys[name])
    for name in (*SETS, *(f"{place}_{purpose}" for place in ("queue", "leases") for purpose in Purpose)):
        pipe.zrange(keys[name], 0, -1, withscores=True)
    pipe.get(keys["tables"])
    pipe.lrange(keys["stale"], 0, -1)
    replies = iter(link.execute(pipe))
    hashes = {name: {_text(key): value for key, value in next(replies).items()} for name in HASHES}
    sets = {name: _scores(next(replies)) for name in SETS}
    queued, leased = ({key: purpose for purpose in Purpose for key in _scores(next(replies))} for _ in range(2))
    meta = hashes["meta"]
    if "restoring" in meta:
        raise UnavailableError(f"a restore into Redis at {link.where} is under way or was cut off: restore it again")
    records = {key: unpack_record(blob) for key, blob in hashes["records"].items()}
    sizes = {key: records[key].num_bytes if key in records else 0 for key in hashes["refs"]}
    return Audit(
        assembled=int(meta.get("assembled", 0)),
        committed=int(meta.get("committed", 0)),
        checkpointed=int(meta.get("checkpointed", 0)),
        num_bytes=int(meta.get("bytes", 0)),
        fresh_bytes=int(meta.get("fresh_bytes", 0)),
        tables=unpack_tables(next(replies) or b""),
        stale=frozenset(unpack_fate(fate).group_id for fate in next(replies)),
        bad_prompts=frozenset(hashes["bad_prompts"]),
        batches={int(step): unpack_batch_record(blob) for step, blob in hashes["batches"].items()},
        records=records,
        references={key: reference_count(value) for key, value in hashes["refs"].items()},
        frame_sizes={**_sizes(link, keys, sizes), **_unreferenced(link, keys, sizes)},
        fresh=tuple(sets["fresh"]),
        reevaluated=tuple(sets["reevaluated"]),
        evaluated=_by_label(sets["evaluated"]),
        evaluations=_numbers(hashes["evaluations"]),
        opened={key: _open_facts(_text(value)) for key, value in hashes["live"].items()},
        queued=queued,
        leased=leased,
        holders={key: _text(worker) for key, worker in hashes["holders"].items()},
        held=_numbers(hashes["held"]),
        contents=frozenset(hashes["requests"]),
        done=frozenset(sets["done"]),
        planned={key: int(score) for key, score in sets["planned"].items()},
        rounds={int(step): int(left) for step, left in hashes["rounds"].items()},
    )


def _sizes(link: RedisLink, keys: Keys, recorded: Mapping[str, int]) -> dict[str, int]:
    """Group id -> bytes of its frame, for those that still are referred to; the recorded size for the others."""
    found: dict[str, int] = {}
    for group_id, is_referred, size in _looked_at(link, keys, list(recorded)):
        if not is_referred:
            found[group_id] = recorded[group_id]
        elif size:
            found[group_id] = size
    return found


def _unreferenced(link: RedisLink, keys: Keys, known: Mapping[str, int]) -> dict[str, int]:
    """Frames that nothing refers to, and frames on their way in that would never expire."""
    with link.errors_named():
        names = _scan(link, keys.group("*"))
        group_ids = [name[len(keys.group("")) :] for name in names]
        others = [group_id for group_id in group_ids if group_id not in known]
        found = {key: size for key, is_referred, size in _looked_at(link, keys, others) if size and not is_referred}
        for name in _scan(link, keys.incoming("*")):
            if link.client.pttl(name) == -1:
                found[name.rpartition(":")[2]] = int(link.client.strlen(name))
    return found


def _looked_at(link: RedisLink, keys: Keys, group_ids: Sequence[str]) -> Iterator[tuple[str, bool, int]]:
    """(id, whether something refers to it, bytes of its frame), each pair of facts from the same moment."""
    remaining = iter(group_ids)
    while chunk := list(islice(remaining, GROUPS_AT_ONCE)):
        pipe = link.client.pipeline(transaction=True)
        for group_id in chunk:
            pipe.hexists(keys["refs"], group_id)
            pipe.strlen(keys.group(group_id))
        replies = link.execute(pipe)
        yield from zip(chunk, map(bool, replies[::2]), replies[1::2], strict=True)


def _scan(link: RedisLink, pattern: str) -> list[str]:
    return [_text(name) for name in link.client.scan_iter(match=pattern, count=SCANNED_AT_ONCE)]


def _by_label(members: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for member in members:
        label, _, request_id = member.partition(" ")
        found.setdefault(label, []).append(request_id)
    return {label: tuple(request_ids) for label, request_ids in found.items()}


def _open_facts(live: str) -> OpenFacts:
    _, purpose, step, *_ = live.split(" ")
    return OpenFacts(purpose=Purpose(purpose), step=int(step))


def _scores(rows: Sequence[tuple[bytes, float]]) -> dict[str, float]:
    return {_text(member): score for member, score in rows}


def _numbers(found: Mapping[str, bytes]) -> dict[str, int]:
    return {key: int(value) for key, value in found.items()}


def _text(value: bytes) -> str:
    return value.decode()
