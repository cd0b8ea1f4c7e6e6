"""Status and health of one run in Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import ResponseError

from bapo.errors import UnavailableError
from bapo.messages import BufferStatus, WorkerLeases
from buffer_service.codec import unpack, unpack_tables
from buffer_service.redis_keys import Keys
from buffer_service.redis_kind import REPLICA
from buffer_service.redis_link import RedisLink
from buffer_service.redis_look import read, read_map
from buffer_service.store import SILENT_WORKER_S
from buffer_service.values import Health, Memory, SelectorState


def status_of(run: str, reply: Sequence[Any]) -> BufferStatus:
    """The reply of status.lua."""
    meta_row, requests, (num_fresh, num_reevaluated), evaluations, rounds, heard, held, blob, lines, now_ms = reply
    texts, tables = _texts(meta_row), unpack_tables(blob)
    last_failure = texts.pop("last_failure", "")
    meta = {key: int(value) for key, value in texts.items()}
    purposes = [word.decode() for word in requests[::3]]
    leased = _numbers(held)
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
        c2=tables.c2,
        c3=tables.c3,
        evaluations=_numbers(evaluations),
        reevaluation_rounds={int(step): left for step, left in sorted(_numbers(rounds).items())},
        workers=workers,
        failures_in_a_row=meta.get("failures_in_a_row", 0),
        last_failure=last_failure,
        num_bytes=meta.get("bytes", 0),
        batches=[unpack(line) for line in reversed(lines)],
        demand=tables.demand.sentence if tables.demand else "",
        extra_rounds=tables.extra_rounds,
    )


def selector_state_of(link: RedisLink, keys: Keys) -> SelectorState:
    """The newest that was kept, read at one moment."""
    numbers = ("HMGET", keys["meta"], "selector_round", "selector_through")
    (last, through), data = read(link, keys, numbers, ("GET", keys["selector"]))
    return SelectorState(round=int(last or 0), through=int(through or 0), data=data or b"")


def compositions_of(link: RedisLink, keys: Keys, offset: int, limit: int) -> tuple[int, list[Mapping[str, Any]]]:
    """(how many lines there are, a page of them)."""
    key = keys["compositions"]
    total, lines = read(link, keys, ("LLEN", key), ("LRANGE", key, offset, offset + limit - 1))
    return total, [unpack(line) for line in lines]


def counters_of(link: RedisLink, keys: Keys) -> dict[str, int]:
    """Event -> count."""
    return {event.decode(): int(number) for event, number in read_map(link, keys, "counters").items()}


def memory_of(link: RedisLink) -> Memory:
    """Of the whole server."""
    with link.errors_named():
        info = link.client.info("memory")
    return Memory(used=int(info["used_memory"]), limit=int(info.get("maxmemory", 0)))


def health_of(link: RedisLink) -> Health:
    """Whether Redis answers soon and takes writes, and whether it would still know its data after a restart."""
    with link.errors_named():
        info: Mapping[str, Any] = {**link.soon.info("persistence"), **link.soon.info("replication")}
    if info.get("loading"):
        raise UnavailableError(f"Redis at {link.where} is still loading its data")
    if info.get("role") in REPLICA:
        raise UnavailableError(f"Redis at {link.where} has become a replica and takes no writes")
    aof = bool(info.get("aof_enabled"))
    detail = _persistence(link) if aof else "no append-only file: what was acknowledged is lost when Redis ends"
    if aof and info.get("aof_last_write_status") != "ok":
        raise UnavailableError(f"Redis at {link.where} cannot write its append-only file")
    return Health(where=link.where, persistent=aof, detail=detail)


def _persistence(link: RedisLink) -> str:
    """How often the append-only file reaches the disk. A managed Redis may refuse to tell."""
    with link.errors_named():
        try:
            answer = link.soon.config_get("appendfsync")
        except ResponseError:
            answer = {}
    return f"append-only file, fsync {answer.get('appendfsync', 'unknown')}"


def _texts(flat: Sequence[bytes]) -> dict[str, str]:
    """A hash as Lua returns it."""
    return {key.decode(): value.decode() for key, value in zip(flat[::2], flat[1::2], strict=True)}


def _numbers(flat: Sequence[bytes]) -> dict[str, int]:
    return {key: int(value) for key, value in _texts(flat).items()}
