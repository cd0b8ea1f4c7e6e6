"""Values as msgpack: groups, batches, prompts, requests and results, each mapped here and nowhere else.

    group frame   header: everything that a rule needs (ids, rewards, versions, lengths)
                  body:   prompt ids i32 [P], then the columns of `PER_TOKEN` [T], little-endian
    batch frame   header: numbers, origins, results, and items that are not one whole group (`bapo.core.batch_items`)
                  body:   the frames of its groups, in order

So the buffer classifies a group by its header alone, in the same time for 8 as for 8192 tokens per response. Unknown
keys, wrong types and truncated bytes are a ContractError.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, NamedTuple

import msgpack
import msgspec
import numpy as np

from bapo.core.batch_items import ITEMS, entries_of, entry_fields
from bapo.core.errors import ContractError, Refusal
from bapo.core.frames import (
    KIND_BATCH,
    KIND_GROUP,
    MAX_PROMPT_BYTES,
    frame_digest,
    frame_head,
    frame_parts,
    frame_start,
    head_parts,
    open_frame,
    require_plain,
    split_frames,
    unpack_plain,
)
from bapo.core.token_arrays import require_spans
from bapo.core.types import (
    PER_TOKEN,
    Batch,
    Group,
    GroupResult,
    ImageDigests,
    Outcome,
    Prompt,
    Purpose,
    RolloutRequest,
    Timing,
)

_ENCODER = msgspec.msgpack.Encoder()


_I4, _F4 = np.dtype("<i4"), np.dtype("<f4")
_TOKEN_BYTES = sum(np.dtype(kind).itemsize for kind in PER_TOKEN.values())
_COMMON = ("group_id", "prompt", "purpose", "step", "label", "worker_id", "timing")
"""Fields that Group and GroupHeader share."""


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
    body = [_bytes(group.prompt_token_ids, "<i4")]
    body += [_bytes(getattr(group, name), kind) for name, kind in PER_TOKEN.items()]
    return b"".join([frame_start(KIND_GROUP, header, sum(map(len, body))), *body])


def read_group_header(frame: bytes | memoryview) -> GroupHeader:
    """The header of a group frame, of which only the head may be there (`frame_head`).

    Raises: ContractError for anything that `pack_group` could not have written.
    """
    packed, num_body_bytes = head_parts(frame_head(frame), KIND_GROUP)
    header = checked_header(header_fields(packed), num_body_bytes)
    if header.outcomes.count(Outcome.EXPERT) == len(header.outcomes):  # only as an entry of a batch
        raise ContractError(f"group {header.group_id}: all responses are expert responses", Refusal.SHAPE)
    return header


def frame_problem(frame: bytes | memoryview | None, num_bytes: int, digest: str) -> str:
    """Why these bytes are not the frame with this length and digest, as one word; empty if they are.

    `missing`, `frame` (wrong length), `digest`, or a value of `Refusal` for invalid columns.
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
    """`bapo.core.frames.frame_head` of its frame."""
    name: str
    """Under which the frame was written."""
    digest: str
    """`bapo.core.frames.frame_digest` of the frame."""


class PulledFrame(NamedTuple):
    """One frame of a batch, which the learner reads by the group's id."""

    group_id: str
    num_bytes: int
    digest: str


def pack_push(groups: Sequence[PushedGroup]) -> bytes:
    packed: bytes = msgpack.packb([tuple(group) for group in groups])
    return packed


def unpack_push(data: bytes) -> list[PushedGroup]:
    """Inverse of `pack_push`. Raises: ContractError."""
    rows = _rows(data, "a push")
    for row in rows:
        if not isinstance(row, list) or list(map(type, row)) != [bytes, str, str]:
            raise ContractError(f"a pushed group must be [header, name, digest], got {row!r:.200}", Refusal.HEADER)
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
        raise ContractError(f"the response is not a batch: {error}") from error


def _rows(data: bytes, what: str) -> list[Any]:
    rows = unpack_plain(memoryview(data))
    if not isinstance(rows, list):
        raise ContractError(f"{what} is not a list", Refusal.HEADER)
    return rows


def unpack_group(frame: bytes | memoryview) -> Group:
    """The group in one frame; its arrays are read-only views into `frame`. Raises: ContractError."""
    packed, body = frame_parts(frame, KIND_GROUP)
    fields = header_fields(packed)
    header = checked_header(fields, len(body))
    columns: dict[str, Any] = {}
    start = 4 * header.num_prompt
    for name, kind in PER_TOKEN.items():
        columns[name] = np.frombuffer(body, kind, header.num_tokens, start)
        start += columns[name].nbytes
    return Group(
        **{name: getattr(header, name) for name in _COMMON},
        **columns,
        prompt_token_ids=np.frombuffer(body, _I4, header.num_prompt),
        lengths=np.frombuffer(fields.lengths, _I4),
        rewards=np.frombuffer(fields.rewards, _F4),
        outcomes=np.frombuffer(fields.outcomes, np.uint8),
        versions=np.frombuffer(fields.versions, _I4).reshape(-1, 2),
        spans=None if fields.spans is msgspec.UNSET else np.frombuffer(fields.spans, _I4).reshape(-1, 2),
    )


def pack_batch(batch: Batch) -> bytes:
    """One batch as one frame whose body is its groups' frames, in order."""
    return pack_batch_frames(batch_header(batch), [pack_group(entry.group) for entry in batch.entries])


def batch_header(batch: Batch) -> dict[str, Any]:
    """The header of a batch frame: everything but the groups' own frames."""
    results = [result_map(result) for result in batch.results]
    numbers = {"r_tot": batch.r_tot, "facts": dict(batch.facts)}
    return {"step": batch.step, **entry_fields(batch.entries), **numbers, "results": results}


def pack_batch_frames(header: Mapping[str, Any], frames: list[bytes]) -> bytes:
    """A batch frame from its header and stored group frames: the service never unpacks the groups."""
    # msgspec is six times faster. It would take sets for lists; but no foreign values are in this header.
    return b"".join([frame_start(KIND_BATCH, header, sum(map(len, frames)), _ENCODER.encode), *frames])


def unpack_batch(frame: bytes | memoryview) -> Batch:
    """The batch in one frame. Raises: ContractError."""
    header, body = open_frame(frame, KIND_BATCH)
    _require_batch_types(header)
    groups = [unpack_group(part) for part in split_frames(body)]
    return Batch(
        step=header["step"],
        entries=tuple(entries_of(header, groups)),
        r_tot=float(header["r_tot"]),
        facts=header["facts"],
        results=tuple(result_from_map(fields) for fields in header["results"]),
    )


_NUMBER = (float, int)
_BATCH_TYPES: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "r_tot": _NUMBER,
    "facts": dict,
    **dict.fromkeys(("origins", "results", ITEMS), list),
}


def _require_batch_types(header: Mapping[str, Any]) -> None:
    """Refuse a batch header with other keys or types. Raises: ContractError."""
    if header.keys() | {ITEMS} != _BATCH_TYPES.keys():
        raise ContractError(
            f"batch header has the keys {sorted(map(str, header))}, expected {sorted(_BATCH_TYPES)}", Refusal.HEADER
        )
    for key, value in header.items():
        if not isinstance(value, _BATCH_TYPES[key]):
            raise ContractError(
                f"batch header: {key} must be {_BATCH_TYPES[key]}, got {type(value).__name__}", Refusal.HEADER
            )
    for name, value in {"r_tot": header["r_tot"], **header["facts"]}.items():
        if not isinstance(value, _NUMBER) or not math.isfinite(value):
            raise ContractError(f"batch {header['step']}: {name} must be a finite number, got {value!r:.100}")


def _bytes(array: np.ndarray[Any, Any], dtype: str) -> bytes:
    """Raises: ContractError for numbers that numpy would cut to the column's type without a word."""
    wanted = np.dtype(dtype)
    if wanted.kind in "iu" and array.size and array.dtype != wanted:
        if array.dtype.kind not in "iub":
            raise ContractError(f"expected integers ({wanted}), got {array.dtype}", Refusal.SHAPE)
        lowest, highest, fits = int(array.min()), int(array.max()), np.iinfo(wanted)
        if lowest < fits.min or highest > fits.max:
            raise ContractError(f"numbers from {lowest} to {highest} do not fit into {wanted}", Refusal.TOKEN_IDS)
    return np.ascontiguousarray(array, dtype=wanted).tobytes()


class GroupHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a group frame, read without touching its tokens."""

    group_id: str
    prompt: Prompt
    purpose: Purpose
    step: int
    label: str
    worker_id: str
    num_prompt: int
    """Tokens of the prompt."""
    lengths: tuple[int, ...]
    rewards: tuple[float, ...]
    policy_version: int
    """Oldest version that sampled any token."""
    newest_version: int
    num_tokens: int
    """Sampled tokens of all responses."""
    outcomes: bytes
    """[G] values of Outcome, one byte per response."""
    timing: Timing


class _PromptFields(msgspec.Struct, forbid_unknown_fields=True):
    prompt_id: str
    text: str
    task: str
    answer: msgspec.Raw
    images: ImageDigests = ()


class HeaderFields(msgspec.Struct, forbid_unknown_fields=True, rename={"group_id": "id", "worker_id": "worker"}):
    """A header as it is stored in its frame: each key with its type, the columns as unchecked bytes."""

    group_id: str
    prompt: _PromptFields
    purpose: Purpose
    step: int
    label: str
    worker_id: str
    num_prompt: int
    lengths: bytes
    """i4 [G]"""
    rewards: bytes
    """f4 [G]"""
    outcomes: bytes
    """u1 [G]"""
    versions: bytes
    """i4 [G, 2]"""
    timing: tuple[float, float, float]
    spans: bytes | msgspec.UnsetType = msgspec.UNSET
    """i4 [n, 2], only when several policy versions sampled a response."""


_DECODER = msgspec.msgpack.Decoder(HeaderFields)


def header_fields(packed: memoryview) -> HeaderFields:
    """The keys and values of a packed header. Raises: ContractError."""
    try:
        return _DECODER.decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ContractError(f"group header: {error}"[:200], Refusal.HEADER) from error


def checked_header(fields: HeaderFields, num_body_bytes: int) -> GroupHeader:
    """The header with its columns as plain numbers: for G entries numpy's calls cost more than what they do.

    Raises: ContractError.
    """
    size = len(fields.rewards) // 4
    sizes = [len(fields.lengths), len(fields.rewards), len(fields.outcomes), len(fields.versions)]
    if size == 0 or sizes != [4 * size, 4 * size, size, 8 * size]:
        raise ContractError(f"group header: columns of {sizes} bytes do not describe the same responses", Refusal.SHAPE)
    ints, floats, pairs = _formats(size)
    lengths, rewards, versions = ints(fields.lengths), floats(fields.rewards), pairs(fields.versions)
    _require_plausible(fields, lengths, rewards, versions, num_body_bytes)
    if fields.spans is not msgspec.UNSET:
        _check_spans(fields, fields.spans, size)
    return GroupHeader(
        group_id=fields.group_id,
        prompt=_prompt(fields.prompt),
        purpose=fields.purpose,
        step=fields.step,
        label=fields.label,
        worker_id=fields.worker_id,
        num_prompt=fields.num_prompt,
        lengths=lengths,
        rewards=rewards,
        policy_version=min(versions[0::2]),
        newest_version=max(versions[1::2]),
        num_tokens=sum(lengths),
        outcomes=fields.outcomes,
        timing=_timing(fields),
    )


def _require_plausible(
    fields: HeaderFields,
    lengths: tuple[int, ...],
    rewards: tuple[float, ...],
    versions: tuple[int, ...],
    num_body_bytes: int,
) -> None:
    """Raises: ContractError for numbers that no correct worker sends."""
    where, num_tokens = f"group {fields.group_id}", sum(lengths)
    if min(lengths) < 1 or fields.num_prompt < 0:
        raise ContractError(f"{where}: a response or the prompt has a negative or zero length", Refusal.SHAPE)
    if num_body_bytes != 4 * fields.num_prompt + _TOKEN_BYTES * num_tokens:
        raise ContractError(f"{where}: {num_body_bytes} body bytes for {num_tokens} tokens", Refusal.SHAPE)
    # A NaN may hide from min and max, but not from a sum.
    are_shares = math.isfinite(sum(rewards)) and min(rewards) >= 0.0 and max(rewards) <= 1.0
    if not are_shares or max(fields.outcomes) > Outcome.EXPERT:
        raise ContractError(f"{where}: rewards must be in [0, 1] and outcomes 0 to 2", Refusal.REWARDS)
    if min(versions[0::2]) < 0 or any(map(operator.gt, versions[0::2], versions[1::2])):
        raise ContractError(f"{where}: versions {list(versions)} are not pairs (oldest, newest)", Refusal.VERSIONS)


@lru_cache(maxsize=64)
def _formats(size: int) -> tuple[Any, Any, Any]:
    """What unpacks lengths, rewards and versions of that many responses."""
    ints, floats, pairs = (struct.Struct(f"<{layout}") for layout in (f"{size}i", f"{size}f", f"{2 * size}i"))
    return ints.unpack, floats.unpack, pairs.unpack


def _check_spans(fields: HeaderFields, spans: bytes, size: int) -> None:
    """Only of responses that several versions sampled, so arrays may cost what they cost."""
    if len(spans) % 8:
        raise ContractError(f"group {fields.group_id}: spans of {len(spans)} bytes are not pairs", Refusal.VERSIONS)
    rows, lengths, pairs = (np.frombuffer(data, "<i4") for data in (spans, fields.lengths, fields.versions))
    require_spans(fields.group_id, rows.reshape(-1, 2), lengths, pairs.reshape(size, 2))


def _prompt(fields: _PromptFields) -> Prompt:
    answer = require_answer(unpack_plain(memoryview(fields.answer)))
    return Prompt(prompt_id=fields.prompt_id, text=fields.text, task=fields.task, answer=answer, images=fields.images)


def _timing(fields: HeaderFields) -> Timing:
    for name, value in zip(Timing.__struct_fields__, fields.timing, strict=True):
        if not 0.0 <= value < math.inf:
            message = f"group {fields.group_id}: timing.{name} is {value}, must be finite and >= 0"
            raise ContractError(message, Refusal.HEADER)
    claimed_at, sample_s, grade_s = fields.timing
    return Timing(claimed_at=claimed_at, sample_s=sample_s, grade_s=grade_s)


_PROMPT_KEYS = ("prompt_id", "text", "task", "answer")
_REQUEST_KEYS = tuple(field.name for field in fields(RolloutRequest))
_OPTIONAL_KEYS = {"item", "rows", "kind", "outcomes"}
_RESULT_KEYS = tuple(field.name for field in fields(GroupResult) if field.name not in _OPTIONAL_KEYS)


def purpose_word(purpose: Purpose) -> str:
    """The word of a purpose, given as such or as Purpose. Raises: ContractError for an unknown one."""
    try:
        return Purpose(purpose).value
    except ValueError as error:
        known = ", ".join(Purpose)
        raise ContractError(f"invalid purpose {purpose!r}, must be one of {known}", Refusal.HEADER) from error


def prompt_map(prompt: Prompt) -> dict[str, Any]:
    """A prompt as a map, without `images` if it has none. Raises: ContractError for an answer that is not a map."""
    if not isinstance(prompt.answer, Mapping):
        found = type(prompt.answer).__name__
        raise ContractError(
            f"prompt {prompt.prompt_id}: the answer must be a map, for example {{'answer': '42'}}, or {{}} if there is "
            f"none; got {found}",
            Refusal.HEADER,
        )
    values = {name: getattr(prompt, name) for name in _PROMPT_KEYS} | {"answer": dict(prompt.answer)}
    return values | ({"images": list(prompt.images)} if prompt.images else {})


def require_carried(prompt: Prompt) -> None:
    """Refuse a prompt that the buffer or a group's header would refuse, hours later and without its place in a file.

    Raises: ContractError.
    """
    require_answer(prompt.answer)
    _image_digests(prompt.prompt_id, prompt.images)
    try:
        size = len(msgpack.packb(prompt_map(prompt)))
    except (TypeError, ValueError, OverflowError) as error:  # halves of characters; integers beyond 64 bits
        raise ContractError(f"it cannot be packed: {error}", Refusal.HEADER) from error
    if size > MAX_PROMPT_BYTES:
        raise ContractError(
            f"it has {size} bytes with its answer and columns; the limit is {MAX_PROMPT_BYTES}",
            Refusal.HEADER,
        )


def prompt_from_map(values: Mapping[str, Any]) -> Prompt:
    """A prompt from its map. Raises: ContractError."""
    if not isinstance(values, dict) or values.keys() - {"images"} != set(_PROMPT_KEYS):
        raise ContractError(f"prompt has the keys {sorted(map(str, values))}", Refusal.HEADER)
    prompt_id, text, task, answer = values["prompt_id"], values["text"], values["task"], values["answer"]
    if not (isinstance(prompt_id, str) and isinstance(text, str) and isinstance(task, str)):
        raise ContractError("prompt_id, text and task must be strings", Refusal.HEADER)
    images = _image_digests(prompt_id, values.get("images", ()))
    return Prompt(prompt_id=prompt_id, text=text, task=task, answer=require_answer(answer), images=images)


def _image_digests(prompt_id: str, values: Any) -> tuple[str, ...]:
    """Raises: ContractError."""
    try:
        return msgspec.convert(values, ImageDigests)
    except msgspec.ValidationError as error:
        raise ContractError(f"prompt {prompt_id}: images: {error}", Refusal.HEADER) from error


def require_answer(answer: Any) -> dict[str, Any]:
    """What a prompt's answer may be: a map of plain values. Raises: ContractError for anything else."""
    if not isinstance(answer, dict):
        raise ContractError("a prompt's answer must be a map", Refusal.HEADER)
    require_plain(answer, "a prompt's answer")
    return answer


def request_map(request: RolloutRequest) -> dict[str, Any]:
    """A request as JSON values. Raises: ContractError for an unknown purpose or an answer that is not a map."""
    values = {name: getattr(request, name) for name in _REQUEST_KEYS}
    return values | {"prompt": prompt_map(request.prompt), "purpose": purpose_word(request.purpose)}


def request_from_map(values: Mapping[str, Any]) -> RolloutRequest:
    """Inverse of `request_map`. Raises: ContractError."""
    try:
        return RolloutRequest(
            **{**values, "purpose": Purpose(values["purpose"]), "prompt": prompt_from_map(values["prompt"])}
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ContractError(f"rollout request is malformed: {error!r}") from error


def result_map(result: GroupResult) -> dict[str, Any]:
    """A result as a map. Fields of groups that train in parts, and outcomes, are left out where they say nothing."""
    values = {name: getattr(result, name) for name in _RESULT_KEYS}
    if result.item:
        values |= {"item": result.item, "rows": result.rows, "kind": result.kind}
    if result.outcomes:
        values["outcomes"] = list(result.outcomes)
    return values


def result_from_map(values: Mapping[str, Any]) -> GroupResult:
    """Inverse of `result_map`. Raises: ContractError."""
    if not isinstance(values, Mapping) or set(values) - _OPTIONAL_KEYS != set(_RESULT_KEYS):
        raise ContractError(f"a result must be a map with the keys {sorted(_RESULT_KEYS)}, got {values!r:.200}")
    try:
        return msgspec.convert({**values, "outcomes": bytes(list(values.get("outcomes") or ()))}, GroupResult)
    except (TypeError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise ContractError(f"a result is malformed: {error}") from error
