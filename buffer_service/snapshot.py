"""A snapshot: one binary with all buffer state that a resumed run needs.

    "BAPOSNAP" | version u32 | index length u64 | index (msgpack) | group frames | sha256 of all before

The frames are in the order of the index's `frames`. The index is the Image, so its types define the format.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Annotated

import msgspec

from bapo.core.call_limits import in_parts
from bapo.core.errors import ContractError, UnavailableError
from bapo.core.types import NAME, PROMPT_ID, Count, Prompt
from buffer_service.state import GroupRecord, prompt_digest
from buffer_service.store.redis.store import FRAMES_AT_ONCE, RedisStore
from buffer_service.store.run_image import Image

log = logging.getLogger(__name__)

MAGIC = b"BAPOSNAP"
VERSION = 3
START = struct.Struct("<8sIQ")
PAUSE_S = 0.002
"""Pause after each chunk of a snapshot: on a small machine, hashing would otherwise delay pushes."""
DIGEST_BYTES = hashlib.sha256().digest_size


class _Index(msgspec.Struct, frozen=True):
    image: Image
    frames: list[str]
    """Group ids."""


def read_snapshot(store: RedisStore) -> Iterator[list[bytes]]:
    """One consistent snapshot, in chunks. Raises, while it is read: UnavailableError if groups are consumed."""
    image = store.image()
    group_ids = sorted(image.references)
    index = msgspec.msgpack.encode(_Index(image, group_ids))
    log.info("snapshot assembled=%d groups=%d", image.tables.step, len(group_ids))
    start = START.pack(MAGIC, VERSION, len(index)) + index
    yield [start]
    digest = hashlib.sha256(start)
    for part in in_parts(group_ids, FRAMES_AT_ONCE):
        frames = [_whole(*pair) for pair in zip(store.frames(part), store.records(part), strict=True)]
        for frame in frames:
            digest.update(frame)
        yield frames
        time.sleep(PAUSE_S)
    yield [digest.digest()]


def _whole(frame: bytes | None, record: GroupRecord | None) -> bytes:
    """The frame; if it is lost, zeros of the recorded length, which the reader detects and skips.

    Raises: UnavailableError if the group was deleted.
    """
    if record is None:
        raise UnavailableError("the buffer changed while a snapshot was read: retry")
    return bytes(record.num_bytes) if frame is None or len(frame) != record.num_bytes else frame


def unpack_snapshot(data: bytes | memoryview) -> tuple[Image, Iterator[tuple[str, memoryview]]]:
    """The image, and (group id, frame) of every group it references.

    Raises: ContractError if anything is missing, damaged or of another version.
    """
    view = memoryview(data)
    if len(view) < START.size + DIGEST_BYTES:
        raise ContractError(f"snapshot is truncated: {len(view)} bytes")
    magic, version, num_index = START.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise ContractError(f"not a buffer snapshot of version {VERSION}: starts with {bytes(view[:12])!r}")
    content = view[:-DIGEST_BYTES]
    if hashlib.sha256(content).digest() != view[-DIGEST_BYTES:]:
        raise ContractError("snapshot is damaged or truncated: its sha256 does not match")
    end = START.size + num_index
    try:
        index = msgspec.msgpack.decode(view[START.size : end], type=_Index)
    except (TypeError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise ContractError(f"snapshot index is malformed: {error!r}"[:500]) from error
    image, referred = index.image, index.image.references
    if sorted(index.frames) != sorted(referred):
        raise ContractError(f"snapshot has {len(index.frames)} frames for {len(referred)} groups")
    require_image(image)
    return image, iter(_frames(image, index.frames, content[end:]))


def _frames(image: Image, group_ids: Sequence[str], content: memoryview) -> list[tuple[str, memoryview]]:
    """(group id, frame), split by the recorded lengths; the learner checks the content of a frame when it reads it.

    Raises: ContractError.
    """
    records = image.all_records
    ends = list(accumulate(records[group_id].num_bytes for group_id in group_ids))
    if (ends[-1] if ends else 0) != len(content):
        raise ContractError(f"snapshot has {len(content)} bytes of frames, which does not match its {len(ends)} groups")
    starts = [0, *ends[:-1]]
    return [(name, content[start:end]) for name, start, end in zip(group_ids, starts, ends, strict=False)]


# A snapshot's checksum detects damage but does not authenticate its author: it may come from another machine. So an
# image is validated before the run that it replaces is touched: by its types, and by the following checks.


class _Composition(msgspec.Struct):
    """The fields of a composition that the service itself reads."""

    x1: Count
    x2: Count
    x3: Count
    batch_size: Annotated[int, msgspec.Meta(ge=1)]


def require_image(image: Image) -> None:
    """Reject an image that no run can have produced. Raises: ContractError."""
    try:
        for line in image.compositions:
            json.dumps(line, allow_nan=False)
            msgspec.convert(line, _Composition)
    except (TypeError, ValueError, RecursionError) as error:
        raise ContractError(f"snapshot has a malformed composition: {error}"[:500]) from error
    _require_names(image)
    _require_records(image)


def _require_names(image: Image) -> None:
    records = image.all_records.values()
    prompts: list[Prompt] = [*image.bad_prompts.values(), *(request.prompt for request in image.requests)]
    for prompt in prompts:
        prompt_digest(prompt)  # refuses an answer that is not JSON
    names = [*image.references, *(record.worker_id for record in records)]
    prompt_ids = [
        *(prompt.prompt_id for prompt in prompts),
        *(record.prompt_id for record in records),
        *(entry.prompt_id for entry in image.tables.bad),
        *(stat.prompt_id for stat in image.tables.high),
    ]
    labels = [record.label for record in records]
    for pattern, given in ((NAME, names), (PROMPT_ID, prompt_ids), (f"({NAME})?", labels)):
        wrong = next((name for name in given if not re.fullmatch(pattern, name)), None)
        if wrong is not None:
            raise ContractError(f"snapshot has an invalid id: {wrong!r:.200}")


def _require_records(image: Image) -> None:
    records: Mapping[str, GroupRecord] = image.all_records
    missing = sorted(image.references.keys() - records.keys())
    if missing:
        raise ContractError(f"snapshot has no record of group {missing[0]}, which its tables or batches reference")
    without = sorted({entry.prompt_id for entry in image.tables.bad} - image.bad_prompts.keys())
    if without:
        raise ContractError(f"snapshot has no text of hard prompt {without[0]}")
    for batch in image.batches:
        if sum(records[group_id].num_bytes for group_id in batch.group_ids) != batch.num_bytes:
            raise ContractError(f"snapshot batch {batch.step}: its groups do not have {batch.num_bytes} bytes")
