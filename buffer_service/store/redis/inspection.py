"""The facts of one run in Redis: the index in one transaction, then the frame sizes with their reference counts.

A group may be pushed or deleted between the two. Groups that are not in the index are left to the next audit; a group
deleted before its frame is read counts as complete, because its record was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from redis.exceptions import ResponseError

from bapo.core.errors import UnavailableError
from bapo.core.types import Purpose
from bapo.transport.messages import BufferStatus, WorkerLeases
from buffer_service.state import Health
from buffer_service.store.invariants import Audit, OpenFacts
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.redis.keys import Keys, reference_count
from buffer_service.store.redis.requirements import REPLICA
from buffer_service.store.redis.rows import unpack, unpack_batch_record, unpack_record, unpack_result, unpack_tables

HASHES = (
    "meta", "records", "refs", "batches", "live", "holders", "held", "rounds", "evaluations", "requests", "bad_prompts",
)  # fmt: skip
SETS = ("fresh", "reevaluated", "evaluated", "done", "planned")
GROUPS_AT_ONCE = 500
SCANNED_AT_ONCE = 1000
SILENT_WORKER_S = 3600.0
"""A worker without leases is forgotten after this long without a call (same value in prelude.lua)."""


def read_audit(link: RedisLink, keys: Keys) -> Audit:
    """Read the audit. O(size of the buffer); blocks Redis for about as long as the index of a snapshot."""
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
        raise UnavailableError(f"a restore into Redis at {link.where} is in progress or was interrupted: restore again")
    records = {key: unpack_record(blob) for key, blob in hashes["records"].items()}
    sizes = {key: records[key].num_bytes if key in records else 0 for key in hashes["refs"]}
    return Audit(
        assembled=int(meta.get("assembled", 0)),
        committed=int(meta.get("committed", 0)),
        checkpointed=int(meta.get("checkpointed", 0)),
        num_bytes=int(meta.get("bytes", 0)),
        fresh_bytes=int(meta.get("fresh_bytes", 0)),
        tables=unpack_tables(next(replies) or b""),
        stale=frozenset(unpack_result(result).group_id for result in next(replies)),
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
    """Group id -> bytes of its frame if it is still referenced, else the recorded size."""
    found: dict[str, int] = {}
    for group_id, is_referred, size in _inspected(link, keys, list(recorded)):
        if not is_referred:
            found[group_id] = recorded[group_id]
        elif size:
            found[group_id] = size
    return found


def _unreferenced(link: RedisLink, keys: Keys, known: Mapping[str, int]) -> dict[str, int]:
    """Unreferenced frames, and incoming frames without expiry."""
    with link.errors_named():
        names = _scan(link, keys.group("*"))
        group_ids = [name[len(keys.group("")) :] for name in names]
        others = [group_id for group_id in group_ids if group_id not in known]
        found = {key: size for key, is_referred, size in _inspected(link, keys, others) if size and not is_referred}
        for name in _scan(link, keys.incoming("*")):
            if link.client.pttl(name) == -1:
                found[name.rpartition(":")[2]] = int(link.client.strlen(name))
    return found


def _inspected(link: RedisLink, keys: Keys, group_ids: Sequence[str]) -> Iterator[tuple[str, bool, int]]:
    """(id, whether it is referenced, bytes of its frame), each read atomically."""
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


# Status and health of one run in Redis.


def status_of(run: str, reply: Sequence[Any]) -> BufferStatus:
    """Parse the reply of status.lua."""
    meta_row, requests, (num_fresh, num_reevaluated), evaluations, rounds, heard, held, blob, lines, now_ms = reply
    texts, tables = _texts(meta_row), unpack_tables(blob)
    last_failure = texts.pop("last_failure", "")
    meta = {key: int(value) for key, value in texts.items()}
    purposes = [word.decode() for word in requests[::3]]
    leased = _status_numbers(held)
    pairs = zip(heard[::2], heard[1::2], strict=True)
    silent = {worker.decode(): (now_ms - int(ms)) / 1000 for worker, ms in pairs}
    workers = {
        worker: WorkerLeases(leased=leased.get(worker, 0), silent_s=round(max(0.0, silent_s), 3))
        for worker, silent_s in sorted(silent.items())
        if leased.get(worker) or silent_s < SILENT_WORKER_S
    }
    return BufferStatus(
        run=run,
        step=meta.get("step", 0),
        policy_version=meta.get("policy_version", 0),
        assembled_step=meta.get("assembled", 0),
        committed_step=meta.get("committed", 0),
        checkpointed_step=meta.get("checkpointed", 0),
        cursor=meta.get("cursor", 0),
        fresh_dropped=meta.get("fresh_dropped", 0),
        fresh_spares=meta.get("fresh_spares", 0),
        queued=dict(zip(purposes, requests[1::3], strict=True)),
        leased=dict(zip(purposes, requests[2::3], strict=True)),
        fresh_ready=num_fresh,
        reevaluated_ready=num_reevaluated,
        num_bad=len(tables.bad),
        num_high=len(tables.high),
        r_tot=tables.r_tot,
        facts=dict(tables.facts),
        evaluations=_status_numbers(evaluations),
        reevaluation_rounds={int(step): left for step, left in sorted(_status_numbers(rounds).items())},
        workers=workers,
        failures_in_a_row=meta.get("failures_in_a_row", 0),
        last_failure=last_failure,
        num_bytes=meta.get("bytes", 0),
        batches=[unpack(line) for line in reversed(lines)],
        demand=tables.demand.sentence if tables.demand else "",
        extra_rounds=tables.extra_rounds,
    )


def health_of(link: RedisLink) -> Health:
    """Whether Redis responds, accepts writes, and keeps its data across a restart. Raises: UnavailableError."""
    with link.errors_named():
        info: Mapping[str, Any] = {**link.soon.info("persistence"), **link.soon.info("replication")}
    if info.get("loading"):
        raise UnavailableError(f"Redis at {link.where} is still loading its data")
    if info.get("role") in REPLICA:
        raise UnavailableError(f"Redis at {link.where} has become a replica and rejects writes")
    aof = bool(info.get("aof_enabled"))
    detail = _persistence(link) if aof else "no append-only file: acknowledged writes are lost if Redis stops"
    if aof and info.get("aof_last_write_status") != "ok":
        raise UnavailableError(f"Redis at {link.where} cannot write its append-only file")
    return Health(where=link.where, persistent=aof, detail=detail)


def _persistence(link: RedisLink) -> str:
    """The fsync policy of the append-only file. Managed services may hide it."""
    with link.errors_named():
        try:
            answer = link.soon.config_get("appendfsync")
        except ResponseError:
            answer = {}
    return f"append-only file, fsync {answer.get('appendfsync', 'unknown')}"


def _texts(flat: Sequence[bytes]) -> dict[str, str]:
    """Convert a hash from its flat Lua form."""
    return {key.decode(): value.decode() for key, value in zip(flat[::2], flat[1::2], strict=True)}


def _status_numbers(flat: Sequence[bytes]) -> dict[str, int]:
    return {key: int(value) for key, value in _texts(flat).items()}
