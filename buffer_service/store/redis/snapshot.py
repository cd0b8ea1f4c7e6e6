"""Images of one run in Redis: read in one transaction, written so that an interrupted restore is detected."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import Any

from redis.client import Pipeline

from bapo.core.errors import UnavailableError
from bapo.core.types import Progress, Purpose, RolloutRequest
from buffer_service.state import FreshGroup, GroupRecord, SelectorState, request_terms
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.redis.errors import OVERTAKEN
from buffer_service.store.redis.keys import FORMAT, MIDDLE, SPAN, Keys, reference_value
from buffer_service.store.redis.rows import (
    pack,
    pack_tables,
    unpack,
    unpack_batch_record,
    unpack_prompt,
    unpack_record,
    unpack_request,
    unpack_result,
    unpack_tables,
)
from buffer_service.store.run_image import Image

BYTES_AT_ONCE = 4 << 20
"""Bytes of frames per transaction, which Redis buffers until its end; the last frame may exceed it."""
KEYS_AT_ONCE = 1000
HASHES = (
    "meta",
    "requests",
    "live",
    "attempts",
    "rounds",
    "records",
    "bad_prompts",
    "batches",
    "counters",
    "success_counts",
)


def read_image(link: RedisLink, keys: Keys) -> Image:
    """Read all index keys in one transaction."""
    with link.errors_named():
        pipe = link.client.pipeline(transaction=True)
        for name in HASHES:
            pipe.hgetall(keys[name])
        for table in ("fresh", "reevaluated"):
            pipe.zrange(keys[table], 0, -1)
        for name in ("compositions", "stale"):
            pipe.lrange(keys[name], 0, -1)
        pipe.get(keys["tables"])
        pipe.get(keys["selector"])
        *maps, fresh, reevaluated, lines, stale, tables, selector = link.execute(pipe)
    texts = [{key.decode(): value for key, value in found.items()} for found in maps]
    meta, requests, live, attempts, rounds, records, prompts, batches, counters, success_counts = texts
    if "restoring" in meta:
        raise UnavailableError(f"a restore into Redis at {link.where} is in progress or was interrupted: restore again")
    record_of = {group_id: unpack_record(blob) for group_id, blob in records.items()}
    image = Image(
        progress=Progress(step=int(meta.get("step", 0)), policy_version=int(meta.get("policy_version", 0))),
        committed=int(meta.get("committed", 0)),
        checkpointed=int(meta.get("checkpointed", 0)),
        cursor=int(meta.get("cursor", 0)),
        fresh_dropped=int(meta.get("fresh_dropped", 0)),
        fresh_spares=int(meta.get("fresh_spares", 0)),
        tables=unpack_tables(tables or b""),
        open_requests=tuple(_open_requests(requests, live, attempts)),
        fresh=tuple(
            FreshGroup(record=record_of[group_id], request=unpack_request(requests[group_id]))
            for group_id in map(bytes.decode, fresh)
        ),
        reevaluated=tuple(record_of[group_id] for group_id in map(bytes.decode, reevaluated)),
        records={},
        bad_prompts={prompt_id: unpack_prompt(blob) for prompt_id, blob in prompts.items()},
        batches=tuple(unpack_batch_record(batches[step]) for step in sorted(batches, key=int)),
        compositions=tuple(unpack(line) for line in reversed(lines)),
        rounds={int(step): int(left) for step, left in rounds.items()},
        stale=tuple(unpack_result(result) for result in reversed(stale)),
        counters={event: int(number) for event, number in counters.items()},
        success_counts={int(step): blob for step, blob in success_counts.items()},
        selector=SelectorState(
            round=int(meta.get("selector_round", 0)),
            through=int(meta.get("selector_through", 0)),
            data=selector or b"",
        ),
    )
    others = image.references.keys() - image.all_records.keys()
    return replace(image, records={group_id: record_of[group_id] for group_id in sorted(others)})


def _open_requests(
    requests: Mapping[str, bytes], live: Mapping[str, bytes], attempts: Mapping[str, bytes]
) -> Iterator[RolloutRequest]:
    """Queued and leased requests in claim order: by descending score for re-evaluations, ascending for the rest."""
    scores = {request_id: int(value.split()[0]) for request_id, value in live.items()}
    opened = {key: unpack_request(requests[key], int(attempts.get(key, 0))) for key in scores}
    for purpose in (Purpose.REEVALUATE, Purpose.FRESH):
        ids = [key for key, request in opened.items() if request.purpose is purpose]
        for request_id in sorted(ids, key=scores.__getitem__, reverse=purpose is Purpose.REEVALUATE):
            yield opened[request_id]


BEGIN = """\
local time = redis.call('TIME')
if time[1] * 1000 + math.floor(time[2] / 1000) > tonumber(ARGV[2]) then
  return redis.error_reply('LATE: it was given up')
end
redis.call('HDEL', KEYS[1], '-')
redis.call('HSET', KEYS[1], 'restoring', ARGV[1])
"""
"""Runs even if Redis is full, see `run_even_when_full`: the replaced state frees memory."""
Stage = Callable[[], AbstractContextManager[Pipeline]]


def write_image(
    link: RedisLink,
    keys: Keys,
    image: Image,
    frames: Iterable[tuple[str, bytes | memoryview]],
    rank: Callable[[GroupRecord], int],
) -> None:
    """Replace the run; `rank` is the sort key of a fresh group before its arrival order.

    While `restoring` is set, every script fails; the last transaction removes it. It contains the nonce of the latest
    restore: after a network failure, a client may repeat its restore while the first one still runs. `refs` is written
    before the frames, so that a restore after an interrupted one finds them.

    Raises: UnavailableError if another restore has started meanwhile.
    """
    nonce = secrets.token_hex(8).encode()
    stage = partial(_stage, link, keys, nonce)
    with link.errors_named():
        link.client.eval(BEGIN, 1, keys["meta"], nonce, link.latest_ms())
        known = link.client.hkeys(keys["refs"])
    _delete_frames(stage, keys, known)
    with stage() as pipe:
        pipe.unlink(keys.settings, *(key for key in keys.index if key != keys["meta"]))
    records = image.all_records
    if image.references:
        with stage() as pipe:
            refs: dict[Any, Any] = {
                group_id: reference_value(number, records[group_id].num_bytes)
                for group_id, number in image.references.items()
            }
            pipe.hset(keys["refs"], mapping=refs)
    num_bytes = _write_frames(stage, keys, frames)
    with stage() as pipe:
        _write_index(pipe, keys, image, num_bytes, rank)
    if link.at_once(("HEXISTS", keys["meta"], "restoring"), written=True)[0]:
        raise UnavailableError(OVERTAKEN)


@contextmanager
def _stage(link: RedisLink, keys: Keys, nonce: bytes) -> Iterator[Pipeline]:
    """A transaction that fails if another restore has started. Raises: UnavailableError."""
    with link.client.pipeline(transaction=True) as pipe:
        with link.errors_named():
            pipe.watch(keys["meta"])
            newest = pipe.hget(keys["meta"], "restoring")
        if newest != nonce:
            raise UnavailableError(OVERTAKEN)
        pipe.multi()
        yield pipe
        link.execute(pipe)


def _delete_frames(stage: Stage, keys: Keys, known: Iterable[bytes]) -> None:
    """Delete the frames of every group in the index."""
    group_ids = iter(known)
    while chunk := list(islice(group_ids, KEYS_AT_ONCE)):
        with stage() as pipe:
            pipe.unlink(*(keys.group(group_id.decode()) for group_id in chunk))


def _write_frames(stage: Stage, keys: Keys, frames: Iterable[tuple[str, bytes | memoryview]]) -> int:
    num_bytes = 0
    for chunk in _chunks(frames):
        with stage() as pipe:
            for group_id, frame in chunk:
                pipe.set(keys.group(group_id), frame)
                num_bytes += len(frame)
    return num_bytes


def _chunks(frames: Iterable[tuple[str, bytes | memoryview]]) -> Iterator[list[tuple[str, bytes | memoryview]]]:
    chunk: list[tuple[str, bytes | memoryview]] = []
    left = BYTES_AT_ONCE
    for group_id, frame in frames:
        chunk.append((group_id, frame))
        left -= len(frame)
        if left <= 0:
            yield chunk
            chunk, left = [], BYTES_AT_ONCE
    if chunk:
        yield chunk


def _write_index(pipe: Pipeline, keys: Keys, image: Image, num_bytes: int, rank: Callable[[GroupRecord], int]) -> None:
    seq = count(1)
    hashes: dict[str, dict[Any, Any]] = {
        "requests": {group.record.group_id: pack(group.request) for group in image.fresh},
        "records": {group_id: pack(record) for group_id, record in image.all_records.items()},
        "bad_prompts": {prompt_id: pack(prompt) for prompt_id, prompt in image.bad_prompts.items()},
        "batches": {batch.step: pack(batch) for batch in image.batches},
        "rounds": dict(image.rounds),
        "counters": dict(image.counters),
        "success_counts": dict(image.success_counts),
        "attempts": {r.request_id: r.attempts for r in image.open_requests if r.attempts},
        "live": {},
    }
    sets: dict[str, dict[Any, Any]] = {
        "fresh": {g.record.group_id: rank(g.record) * SPAN + next(seq) for g in image.fresh},
        "reevaluated": {record.group_id: next(seq) for record in image.reevaluated},
    }
    sets["done"] = dict.fromkeys(hashes["records"], image.tables.step)
    for request in image.open_requests:
        score = _score(request, next(seq))
        hashes["live"][request.request_id] = f"{score} {request_terms(request)}"
        hashes["requests"][request.request_id] = pack(request)
        sets.setdefault(f"queue_{request.purpose.value}", {})[request.request_id] = score
        if request.purpose is Purpose.FRESH:
            sets.setdefault("planned", {})[request.request_id] = request.step
    for name, mapping in hashes.items():
        if mapping:
            pipe.hset(keys[name], mapping=mapping)
    for name, mapping in sets.items():
        if mapping:
            pipe.zadd(keys[name], mapping)
    for line in image.compositions:
        pipe.lpush(keys["compositions"], pack(line))
    for result in image.stale:
        pipe.lpush(keys["stale"], pack(result))
    pipe.set(keys["tables"], pack_tables(image.tables))
    if image.selector.round:
        pipe.set(keys["selector"], image.selector.data)
    pipe.delete(keys["meta"])
    fresh_bytes = sum(group.record.num_bytes for group in image.fresh)
    pipe.hset(keys["meta"], mapping={**_meta(image), "seq": next(seq), "bytes": num_bytes, "fresh_bytes": fresh_bytes})


def _score(request: RolloutRequest, place: int) -> int:
    """Queue score, as computed in prelude.lua."""
    sign = -1 if request.purpose is Purpose.REEVALUATE else 1
    return request.min_version * SPAN + MIDDLE + sign * place


def _meta(image: Image) -> dict[Any, Any]:
    return {
        "format": FORMAT,
        "assembled": image.tables.step,
        "table_edits": image.tables.edits,
        "committed": image.committed,
        "checkpointed": image.checkpointed,
        "step": image.progress.step,
        "policy_version": image.progress.policy_version,
        "cursor": image.cursor,
        "fresh_dropped": image.fresh_dropped,
        "fresh_spares": image.fresh_spares,
        "selector_round": image.selector.round,
        "selector_through": image.selector.through,
    }
