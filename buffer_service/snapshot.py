"""A snapshot: one binary with everything that a resumed run needs of the buffer.

    "BAPOSNAP" | version u32 | index length u64 | index (msgpack) | group frames in a row | sha256 of all before

The frames come in the order of the index's `frames`. The format knows no store: what Redis wrote, memory reads.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

import msgspec
from msgpack.exceptions import UnpackException

from bapo.errors import ContractError
from bapo.messages import request_from_map, request_map
from bapo.types import Progress
from bapo.wire import fate_from_map, fate_map, prompt_from_map, prompt_map
from buffer_service.codec import (
    pack,
    pack_batch_record,
    pack_record,
    pack_tables,
    unpack,
    unpack_batch_record,
    unpack_record,
    unpack_tables,
)
from buffer_service.groups import FreshGroup
from buffer_service.image import Image
from buffer_service.image_checks import require_image
from buffer_service.values import SelectorState

MAGIC = b"BAPOSNAP"
VERSION = 2
START = struct.Struct("<8sIQ")
PAUSE_S = 0.002
"""After each chunk of a snapshot: hashing would keep a core busy, and pushes would wait for it on a small machine."""
DIGEST_BYTES = hashlib.sha256().digest_size
NUMBERS = ("committed", "checkpointed", "cursor", "fresh_dropped", "fresh_spares")


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
