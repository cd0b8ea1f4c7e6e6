"""A snapshot: one binary with everything that a resumed run needs of the buffer.

    "BAPOSNAP" | version u32 | index length u64 | index (msgpack) | group frames in a row | sha256 of all before

The frames come in the order of the index's `frames`. The format knows no store: what Redis wrote, memory reads.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Annotated, Any

import msgspec
from msgpack.exceptions import UnpackException

from bapo.core.codec import fate_from_map, fate_map, prompt_from_map, prompt_map, request_from_map, request_map
from bapo.core.errors import ContractError, UnavailableError
from bapo.core.types import Fate, Progress, Prompt, RolloutRequest
from buffer_service.ingest import LABEL, NAME, PROMPT_ID
from buffer_service.state import FreshGroup, GroupRecord, SelectorState
from buffer_service.store.redis.rows import (
    pack,
    pack_batch_record,
    pack_record,
    pack_tables,
    unpack,
    unpack_batch_record,
    unpack_record,
    unpack_tables,
)
from buffer_service.store.redis.store import FRAMES_AT_ONCE, RedisStore
from buffer_service.store.run_image import Image

log = logging.getLogger(__name__)

MAGIC = b"BAPOSNAP"
VERSION = 2
START = struct.Struct("<8sIQ")
PAUSE_S = 0.002
"""After each chunk of a snapshot: hashing would keep a core busy, and pushes would wait for it on a small machine."""
DIGEST_BYTES = hashlib.sha256().digest_size
NUMBERS = ("committed", "checkpointed", "cursor", "fresh_dropped", "fresh_spares")


def read_snapshot(store: RedisStore) -> Iterator[list[bytes]]:
    """One consistent snapshot, in pieces. Raises, while it is read: UnavailableError when groups are consumed."""
    image = store.image()
    group_ids = sorted(image.references)
    start = snapshot_start(image, group_ids)
    log.info("snapshot assembled=%d groups=%d", image.tables.step, len(group_ids))
    yield [start]
    yield from sealed(start, _frames_of(store, group_ids))


def _frames_of(store: RedisStore, group_ids: Sequence[str]) -> Iterator[list[bytes]]:
    for first in range(0, len(group_ids), FRAMES_AT_ONCE):
        part = group_ids[first : first + FRAMES_AT_ONCE]
        pairs = zip(store.frames(part), store.records(part), strict=True)
        yield [_whole(frame, record) for frame, record in pairs]


def _whole(frame: bytes | None, record: GroupRecord | None) -> bytes:
    """The frame, or as many zeros as its record announces when it is lost: its reader detects that and continues.

    Raises: UnavailableError when the group was deleted.
    """
    if record is None:
        raise UnavailableError("the buffer changed while a snapshot was read: try again")
    return bytes(record.num_bytes) if frame is None or len(frame) != record.num_bytes else frame


def pack_snapshot(image: Image, group_ids: Sequence[str], frames: Iterable[bytes]) -> bytes:
    """The binary. `frames` belong to `group_ids`, in order."""
    start = snapshot_start(image, group_ids)
    return b"".join([start, *(piece for pieces in sealed(start, [list(frames)]) for piece in pieces)])


def snapshot_start(image: Image, group_ids: Sequence[str]) -> bytes:
    """What precedes the frames of these groups, in order."""
    index = pack({**_index_map(image), "frames": list(group_ids)})
    return START.pack(MAGIC, VERSION, len(index)) + index


def sealed(start: bytes, chunks: Iterable[list[bytes]]) -> Iterator[list[bytes]]:
    """The chunks of frames behind `start`, and the digest of everything behind them. Gives way after each chunk."""
    digest = hashlib.sha256(start)
    for frames in chunks:
        for frame in frames:
            digest.update(frame)
        yield frames
        time.sleep(PAUSE_S)
    yield [digest.digest()]


def unpack_snapshot(data: bytes | memoryview) -> tuple[Image, Iterator[tuple[str, memoryview]]]:
    """The image, and (group id, frame) of every group that it refers to.

    Raises: ContractError when anything is missing, damaged or of another version.
    """
    view = memoryview(data)
    if len(view) < START.size + DIGEST_BYTES:
        raise ContractError(f"snapshot is cut off: {len(view)} bytes")
    magic, version, num_index = START.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise ContractError(f"not a buffer snapshot of version {VERSION}: starts with {bytes(view[:12])!r}")
    content = view[:-DIGEST_BYTES]
    if hashlib.sha256(content).digest() != view[-DIGEST_BYTES:]:
        raise ContractError("snapshot is damaged or cut off: its sha256 does not match")
    end = START.size + num_index
    try:
        index = unpack(view[START.size : end])
        image = _image(index)
        group_ids = index["frames"]
        referred = set(image.references)
        is_complete = sorted(group_ids) == sorted(referred)
    except _MALFORMED as error:
        raise ContractError(f"snapshot index is malformed: {error!r}"[:500]) from error
    if not is_complete:
        raise ContractError(f"snapshot has {len(group_ids)} frames for {len(referred)} groups")
    require_image(image)
    return image, iter(_frames(image, group_ids, content[end:]))


def _frames(image: Image, group_ids: Sequence[str], content: memoryview) -> list[tuple[str, memoryview]]:
    """(group id, frame), each as long as its record says: what is in one is looked at when a learner reads it.

    Raises: ContractError.
    """
    records = image.all_records
    ends = list(accumulate(records[group_id].num_bytes for group_id in group_ids))
    if (ends[-1] if ends else 0) != len(content):
        raise ContractError(f"the snapshot has {len(content)} bytes of frames, not those of its {len(ends)} groups")
    starts = [0, *ends[:-1]]
    return [(name, content[start:end]) for name, start, end in zip(group_ids, starts, ends, strict=False)]


_MALFORMED = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    RecursionError,
    struct.error,
    UnpackException,
    msgspec.MsgspecError,
)
"""What values of other types and other lengths than ours raise where they are put together."""


def _index_map(image: Image) -> dict[str, Any]:
    return {
        "progress": asdict(image.progress),
        "numbers": {name: getattr(image, name) for name in NUMBERS},
        "tables": pack_tables(image.tables),
        "open_requests": [request_map(request) for request in image.open_requests],
        "fresh": [(pack_record(group.record), request_map(group.request)) for group in image.fresh],
        "reevaluated": [pack_record(record) for record in image.reevaluated],
        "records": [pack_record(record) for record in image.records.values()],
        "bad_prompts": [prompt_map(prompt) for prompt in image.bad_prompts.values()],
        "batches": [pack_batch_record(batch) for batch in image.batches],
        "compositions": [dict(line) for line in image.compositions],
        "rounds": dict(image.rounds),
        "stale": [fate_map(fate) for fate in image.stale],
        "counters": dict(image.counters),
        "outcomes": dict(image.outcomes),
        "selector": asdict(image.selector),
    }


def _image(index: dict[str, Any]) -> Image:
    records = [unpack_record(row) for row in index["records"]]
    prompts = [prompt_from_map(fields) for fields in index["bad_prompts"]]
    return Image(
        progress=Progress(**index["progress"]),
        **{name: int(index["numbers"].get(name, 0)) for name in NUMBERS},
        tables=unpack_tables(index["tables"]),
        open_requests=tuple(request_from_map(fields) for fields in index["open_requests"]),
        fresh=tuple(
            FreshGroup(record=unpack_record(row), request=request_from_map(fields)) for row, fields in index["fresh"]
        ),
        reevaluated=tuple(unpack_record(row) for row in index["reevaluated"]),
        records={record.group_id: record for record in records},
        bad_prompts={prompt.prompt_id: prompt for prompt in prompts},
        batches=tuple(unpack_batch_record(row) for row in index["batches"]),
        compositions=tuple(index["compositions"]),
        rounds=index["rounds"],
        stale=tuple(fate_from_map(fields) for fields in index["stale"]),
        counters=index["counters"],
        outcomes=index["outcomes"],
        selector=SelectorState(**index["selector"]),
    )


# What is asked of an image that somebody has sent, before anything of the run that it replaces is touched.
#
# A snapshot's checksum finds damage, and says nothing of who wrote the rest: it may come from another machine.

STEPS = 1 << 21
"""As `schemas.Version`: a queue's score has 21 bits for a step."""
COUNTS = 1 << 53
"""Lua holds numbers as doubles."""


Count = Annotated[int, msgspec.Meta(ge=0)]


class _Composition(msgspec.Struct):
    """What the service itself reads of a batch's line; people read the rest."""

    x1: Count
    x2: Count
    x3: Count
    batch_size: Annotated[int, msgspec.Meta(ge=1)]


def require_image(image: Image) -> None:
    """Refuse an image that no run can have left. Raises: ContractError."""
    try:
        # Strict: no bool for a number, no text for bytes, however deep.
        msgspec.convert(msgspec.to_builtins(image, builtin_types=(bytes,)), Image)
        for line in image.compositions:
            json.dumps(line, allow_nan=False)
            msgspec.convert(line, _Composition)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ContractError(f"the snapshot holds what no run has: {error}"[:500]) from error
    for what, step in _steps(image):
        if not 0 <= step < STEPS:
            raise ContractError(f"the snapshot has {what} {step}, not one from 0 to {STEPS - 1}")
    for what, number in _counts(image):
        if not 0 <= number < COUNTS:
            raise ContractError(f"the snapshot has {what} {number}, not one from 0 to {COUNTS - 1}")
    for what, value in _seconds_and_means(image):
        if not math.isfinite(value):
            raise ContractError(f"the snapshot has {what} {value}")
    _require_names(image)
    _require_records(image)


def _requests(image: Image) -> Iterator[RolloutRequest]:
    yield from image.open_requests
    yield from (group.request for group in image.fresh)


def _steps(image: Image) -> Iterator[tuple[str, int]]:
    tables, selector = image.tables, image.selector
    for step in (image.progress.step, image.progress.policy_version, image.committed, image.checkpointed, tables.step):
        yield "a step", step
    for request in _requests(image):
        yield from (("a request of step", request.step), ("a request for version", request.min_version))
    for record in image.all_records.values():
        yield from (("a group of step", record.step), ("a group of version", record.policy_version))
    births = [*(e.birth for e in tables.bad), *(e.birth for e in tables.high), *(e.birth for e in image.stale)]
    for birth in births:
        yield "an entry born in step", birth
    for extra in tables.extra_rounds:
        yield from (("a round of step", extra.step), ("a round", extra.round))
    for batch in image.batches:
        yield "a batch of step", batch.step
    for step in (*image.rounds, *image.outcomes, selector.round, selector.through):
        yield "a round of step", step


def _counts(image: Image) -> Iterator[tuple[str, int]]:
    for number in (image.cursor, image.fresh_dropped, image.fresh_spares, *image.counters.values()):
        yield "a count of", number
    for number in image.rounds.values():
        yield "a round of", number
    for record in image.all_records.values():
        yield from (("bytes of a group", record.num_bytes), ("tokens of a group", record.num_tokens))
    for batch in image.batches:
        yield "bytes of a batch", batch.num_bytes
    for request in _requests(image):
        yield from (("a group size of", request.group_size - 1), ("attempts of", request.attempts))
    for entry in image.tables.bad:
        yield "attempts of", entry.attempts


def _seconds_and_means(image: Image) -> Iterator[tuple[str, float]]:
    tables = image.tables
    yield from (("a threshold", value) for value in (tables.r_tot, tables.c2, tables.c3) if value is not None)
    yield from (("a mean reward", entry.mu) for entry in tables.bad)
    told: list[GroupRecord | Fate] = [*image.all_records.values(), *image.stale]
    for record in told:
        yield from (("a reward", reward) for reward in record.rewards)
        yield from (("a time", value) for value in (record.claimed_at, record.sample_s, record.grade_s))
    yield from (("a reward", reward) for stat in tables.high for reward in (stat.reward_sum, *stat.rewards))


def _require_names(image: Image) -> None:
    records = image.all_records.values()
    requests = list(_requests(image))
    prompts: list[Prompt] = [*image.bad_prompts.values(), *(request.prompt for request in requests)]
    names = [*image.references, *(r.worker_id for r in records), *(r.request_id for r in requests)]
    prompt_ids = [
        *(prompt.prompt_id for prompt in prompts),
        *(record.prompt_id for record in records),
        *(entry.prompt_id for entry in image.tables.bad),
        *(stat.prompt_id for stat in image.tables.high),
    ]
    labels = [*(record.label for record in records), *(request.label for request in requests)]
    for pattern, given in ((NAME, names), (PROMPT_ID, prompt_ids), (LABEL, labels)):
        wrong = next((name for name in given if not pattern.fullmatch(name)), None)
        if wrong is not None:
            raise ContractError(f"the snapshot has the id {wrong!r:.200}, which is no plain name")


def _require_records(image: Image) -> None:
    records: Mapping[str, GroupRecord] = image.all_records
    missing = sorted(image.references.keys() - records.keys())
    if missing:
        raise ContractError(f"the snapshot has no record of group {missing[0]}, which its tables or batches name")
    without = sorted({entry.prompt_id for entry in image.tables.bad} - image.bad_prompts.keys())
    if without:
        raise ContractError(f"the snapshot has no text of the hard prompt {without[0]}")
    for batch in image.batches:
        if sum(records[group_id].num_bytes for group_id in batch.group_ids) != batch.num_bytes:
            raise ContractError(f"the snapshot's batch {batch.step} has not the {batch.num_bytes} bytes that it says")
