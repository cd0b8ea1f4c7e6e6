"""Group and batch frames: what travels between workers, buffer and learner.

The header of a group holds everything that a rule needs (ids, rewards, versions, lengths); the body holds the
columns of tokens as little-endian arrays: prompt ids i32 [P], token ids i32 [T], log-probs f32 [T]. So the buffer
service classifies a group by reading its header alone, in the same time for 8 as for 8192 tokens per response.
The header of a batch holds its numbers, origins and fates; its body is the frames of its groups, in order. Items that
are more than one whole group are described in the header, too (`bapo.batch_items`).

Covers: packing, unpacking, splitting a stream of frames, refusing anything unknown or truncated (ContractError).
Does not cover: compression, encryption, older formats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgpack
import msgspec
import numpy as np

from bapo.batch_items import ITEMS, entries_of, entry_fields
from bapo.columns import Float32s, Int32s
from bapo.errors import ContractError, Refusal
from bapo.frames import (
    KIND_BATCH,
    KIND_GROUP,
    frame_digest,
    frame_head,
    frame_parts,
    frame_start,
    head_parts,
    open_frame,
    split_frames,
    unpack_plain,
)
from bapo.headers import GroupHeader, checked_header, header_fields, require_types
from bapo.maps import fate_from_map, fate_map, prompt_from_map, prompt_map, purpose_word
from bapo.types import Batch, Group, Outcome

_ENCODER = msgspec.msgpack.Encoder()

__all__ = [
    "GroupHeader",
    "PulledFrame",
    "PushedGroup",
    "batch_header",
    "fate_from_map",
    "fate_map",
    "frame_problem",
    "pack_batch",
    "pack_batch_frames",
    "pack_batch_start",
    "pack_group",
    "pack_pull",
    "pack_push",
    "prompt_from_map",
    "prompt_map",
    "read_group_header",
    "split_frames",
    "unpack_batch",
    "unpack_group",
    "unpack_pull",
    "unpack_push",
]


_I4, _F4 = np.dtype("<i4"), np.dtype("<f4")


def pack_group(group: Group) -> bytes:
    """One group as one frame. Raises: ContractError for what cannot be one."""
    header = {
        "id": group.group_id,
        "prompt": prompt_map(group.prompt),
        "purpose": purpose_word(group.purpose),
        "step": group.step,
        "label": group.label,
        "worker": group.worker_id,
        "num_prompt": len(group.prompt_token_ids),
        "lengths": _bytes(group.lengths, "<i4"),
        "rewards": _bytes(group.rewards, "<f4"),
        "outcomes": _bytes(group.outcomes, "u1"),
        "versions": _bytes(group.versions, "<i4"),
        "timing": [group.timing.claimed_at, group.timing.sample_s, group.timing.grade_s],
    }
    if group.spans is not None:
        header["spans"] = _bytes(group.spans, "<i4")
    body = [
        _bytes(group.prompt_token_ids, "<i4"),
        _bytes(group.token_ids, "<i4"),
        _bytes(group.rollout_logprobs, "<f4"),
    ]
    return b"".join([frame_start(KIND_GROUP, header, sum(map(len, body))), *body])


def read_group_header(frame: bytes | memoryview) -> GroupHeader:
    """The header of a group frame, of which only the head may be there (`frame_head`).

    Raises: ContractError for anything that `pack_group` could not have written.
    """
    packed, num_body_bytes = head_parts(frame_head(frame), KIND_GROUP)
    header = checked_header(header_fields(packed), num_body_bytes)
    if header.outcomes.count(Outcome.EXPERT) == len(header.outcomes):  # only as an entry of a batch
        raise ContractError(f"group {header.group_id}: no response was sampled, all are an expert's", Refusal.SHAPE)
    return header


def frame_problem(frame: bytes | memoryview | None, num_bytes: int, digest: str) -> str:
    """Why these bytes are not the frame that was announced with this length and digest, in one word; empty: they are.

    `missing`, `frame` (another length), `digest`, or the word of `Refusal` for columns that no policy can give.
    """
    if frame is None:
        return "missing"
    if len(frame) != num_bytes:
        return Refusal.FRAME.value
    try:
        if frame_digest(frame) != digest:
            return "digest"
        unpack_group(frame)
    except ContractError as error:
        return error.reason.value
    return ""


class PushedGroup(NamedTuple):
    """What is pushed of a group: all but the body of its frame, which lies in Redis."""

    head: bytes
    """`bapo.frames.frame_head` of its frame."""
    name: str
    """Under which the frame was written."""
    digest: str
    """`bapo.frames.frame_digest` of the frame."""


class PulledFrame(NamedTuple):
    """One frame of a batch, which the learner reads by the group's id."""

    group_id: str
    num_bytes: int
    digest: str


def pack_push(groups: Sequence[PushedGroup]) -> bytes:
    """The body of a push."""
    packed: bytes = msgpack.packb([tuple(group) for group in groups])
    return packed


def unpack_push(data: bytes) -> list[PushedGroup]:
    """Inverse of `pack_push`. Raises: ContractError."""
    rows = _rows(data, "a push")
    for row in rows:
        if not isinstance(row, list) or list(map(type, row)) != [bytes, str, str]:
            raise ContractError(f"a pushed group is not [head, name, digest]: {row!r:.200}", Refusal.HEADER)
    return [PushedGroup(*row) for row in rows]


def pack_pull(header: Mapping[str, Any], frames: Sequence[PulledFrame]) -> bytes:
    """A batch without its frames: its header, and which frames are its body, in order."""
    return _ENCODER.encode([header, *frames])


def unpack_pull(data: bytes) -> tuple[dict[str, Any], list[PulledFrame]]:
    """Inverse of `pack_pull`. Raises: ContractError."""
    try:
        header, *frames = _rows(data, "a batch")
        return dict(header), [PulledFrame(*row) for row in frames]
    except (TypeError, ValueError) as error:
        raise ContractError(f"the answer names no batch: {error}") from error


def _rows(data: bytes, what: str) -> list[Any]:
    rows = unpack_plain(memoryview(data))
    if not isinstance(rows, list):
        raise ContractError(f"{what} is not a list", Refusal.HEADER)
    return rows


def unpack_group(frame: bytes | memoryview) -> Group:
    """The group in one frame; its arrays are read-only views into `frame`.

    Raises: ContractError.
    """
    packed, body = frame_parts(frame, KIND_GROUP)
    fields = header_fields(packed)
    checked = checked_header(fields, len(body))
    num_prompt = checked.num_prompt
    ids, logprobs = _columns(body, num_prompt, checked.num_tokens)
    return Group(
        group_id=checked.group_id,
        prompt=checked.prompt,
        purpose=checked.purpose,
        step=checked.step,
        label=checked.label,
        worker_id=checked.worker_id,
        prompt_token_ids=ids[:num_prompt],
        token_ids=ids[num_prompt:],
        rollout_logprobs=logprobs,
        lengths=_array(fields.lengths, "<i4"),
        rewards=_array(fields.rewards, "<f4"),
        outcomes=_array(fields.outcomes, "u1"),
        versions=_array(fields.versions, "<i4").reshape(-1, 2),
        timing=checked.timing,
        spans=None if fields.spans is msgspec.UNSET else _array(fields.spans, "<i4").reshape(-1, 2),
    )


def _columns(body: memoryview, num_prompt: int, num_tokens: int) -> tuple[Int32s, Float32s]:
    """(ids of the prompt and of all responses, log-probs) as views."""
    num_ids = num_prompt + num_tokens
    return np.frombuffer(body, _I4, num_ids), np.frombuffer(body, _F4, num_tokens, 4 * num_ids)


def pack_batch(batch: Batch) -> bytes:
    """One batch as one frame whose body is its groups' frames, in order."""
    return pack_batch_frames(batch_header(batch), [pack_group(entry.group) for entry in batch.entries])


def batch_header(batch: Batch) -> dict[str, Any]:
    """The header of a batch frame: everything but the groups' own frames."""
    return {
        "step": batch.step,
        **entry_fields(batch.entries),
        "r_tot": batch.r_tot,
        "c2": batch.c2,
        "c3": batch.c3,
        "num_bad": batch.num_bad,
        "num_high": batch.num_high,
        "fates": [fate_map(fate) for fate in batch.fates],
    }


def pack_batch_frames(header: Mapping[str, Any], frames: list[bytes]) -> bytes:
    """A batch frame from its header and stored group frames: the service never unpacks the groups."""
    return b"".join([pack_batch_start(header, sum(map(len, frames))), *frames])


def pack_batch_start(header: Mapping[str, Any], num_body_bytes: int) -> bytes:
    """What precedes the groups' frames in a batch frame, so that a server can send them as it reads them."""
    # msgspec is six times faster. It would take sets for lists; but nobody else's values are in this header.
    return frame_start(KIND_BATCH, header, num_body_bytes, _ENCODER.encode)


def unpack_batch(frame: bytes | memoryview) -> Batch:
    """The batch in one frame.

    Raises: ContractError.
    """
    header, body = open_frame(frame, KIND_BATCH)
    require_types(header, _BATCH_TYPES if ITEMS not in header else {**_BATCH_TYPES, ITEMS: list}, "batch")
    if not all(math.isfinite(header[name]) for name in _BATCH_RATIOS):
        raise ContractError(f"batch {header['step']}: {', '.join(_BATCH_RATIOS)} must be finite")
    groups = [unpack_group(part) for part in split_frames(body)]
    return Batch(
        step=header["step"],
        entries=tuple(entries_of(header, groups)),
        r_tot=float(header["r_tot"]),
        c2=float(header["c2"]),
        c3=float(header["c3"]),
        num_bad=header["num_bad"],
        num_high=header["num_high"],
        fates=tuple(fate_from_map(fields) for fields in header["fates"]),
    )


_BATCH_RATIOS = ("r_tot", "c2", "c3")
_BATCH_TYPES: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "origins": list,
    **dict.fromkeys(_BATCH_RATIOS, (float, int)),
    "num_bad": int,
    "num_high": int,
    "fates": list,
}


def _bytes(array: np.ndarray[Any, Any], dtype: str) -> bytes:
    """Raises: ContractError for numbers that numpy would cut to the column's type without a word."""
    wanted = np.dtype(dtype)
    if wanted.kind in "iu" and array.size and array.dtype != wanted:
        if array.dtype.kind not in "iub":
            raise ContractError(f"{array.dtype} where whole numbers are needed ({wanted})", Refusal.SHAPE)
        lowest, highest, fits = int(array.min()), int(array.max()), np.iinfo(wanted)
        if lowest < fits.min or highest > fits.max:
            raise ContractError(f"numbers from {lowest} to {highest} do not fit into {wanted}", Refusal.TOKEN_IDS)
    return np.ascontiguousarray(array, dtype=wanted).tobytes()


def _array(data: bytes, dtype: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, dtype)
