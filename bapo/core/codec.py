"""Values as msgpack: groups, batches, prompts, requests and results, each mapped here and nowhere else.

    group frame   header: everything that a rule needs (ids, rewards, versions, lengths)
                  body:   prompt ids i32 [P], the columns of `PER_TOKEN` [T], context ids i32 [C], little-endian;
                          then, if a teacher has scored the group, its log-probs f32 [T]
    batch frame   header: numbers, origins, results, and items that are not one whole group (`bapo.core.batch_items`)
                  body:   the frames of its groups, in order

So the buffer classifies a group by its header alone, in the same time for 8 as for 8192 tokens per response. Unknown
keys, wrong types and truncated bytes are a ContractError.
"""

from __future__ import annotations

import math
import operator
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from bapo.core.batch_items import BatchHeader, entries_of, entry_fields
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
    pack,
    split_frames,
    unpacked,
)
from bapo.core.json_values import from_map
from bapo.core.reward_details import require_details
from bapo.core.token_arrays import require_spans
from bapo.core.turns import COLUMNS as TURN_COLUMNS
from bapo.core.turns import require_turns
from bapo.core.types import (
    PER_TOKEN,
    PROMPT_ID,
    Batch,
    Group,
    GroupResult,
    Outcome,
    Prompt,
    Purpose,
    RolloutRequest,
    Timing,
    purpose_of,
)

_I4, _F4 = np.dtype("<i4"), np.dtype("<f4")
_TOKEN_BYTES = sum(np.dtype(kind).itemsize for kind in PER_TOKEN.values())
_COMMON = ("group_id", "prompt", "step", "label", "worker_id", "timing")
"""Fields that a group and its header have alike."""


def pack_group(group: Group) -> bytes:
    """One group as one frame. Raises: ContractError for what cannot be one."""
    header = GroupHeader(
        **{name: getattr(group, name) for name in _COMMON},
        purpose=purpose_of(group.purpose),
        num_prompt=len(group.prompt_token_ids),
        lengths_i4=_bytes(group.lengths, "<i4"),
        rewards_f4=_bytes(group.rewards, "<f4"),
        outcomes=_bytes(group.outcomes, "u1"),
        versions_i4=_bytes(group.versions, "<i4"),
        spans_i4=msgspec.UNSET if group.spans is None else _bytes(group.spans, "<i4"),
        turns_i4=msgspec.UNSET if group.turns is None else _bytes(group.turns, "<i4"),
        details_f4={name: _bytes(values, "<f4") for name, values in group.reward_details.items()} or msgspec.UNSET,
    )
    body = [_bytes(group.prompt_token_ids, "<i4")]
    body += [_bytes(getattr(group, name), kind) for name, kind in PER_TOKEN.items()]
    if group.context_ids is not None:
        body.append(_bytes(group.context_ids, "<i4"))
    if group.teacher_logprobs is not None:
        body.append(_bytes(group.teacher_logprobs, "<f4"))
    return b"".join([frame_start(KIND_GROUP, header, sum(map(len, body))), *body])


def read_group_header(frame: bytes | memoryview) -> GroupHeader:
    """The header of a group frame, of which only the head may be there (`frame_head`).

    Raises: ContractError for anything that `pack_group` could not have written.
    """
    header = _checked_header(*head_parts(frame_head(frame), KIND_GROUP))
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


_PUSH = msgspec.msgpack.Decoder(list[PushedGroup])
_PULL = msgspec.msgpack.Decoder(Annotated[list[Any], Meta(min_length=1)])


def pack_push(groups: Sequence[PushedGroup]) -> bytes:
    return pack(groups)


def unpack_push(data: bytes) -> list[PushedGroup]:
    """Inverse of `pack_push`. Raises: ContractError."""
    return unpacked(data, _PUSH, "a push must be [[header, name, digest], ...]")


def pack_pull(header: Mapping[str, Any], frames: Sequence[PulledFrame]) -> bytes:
    """A batch without its frames: its header, and which frames are its body, in order."""
    return pack([header, *frames])


def unpack_pull(data: bytes) -> tuple[dict[str, Any], list[PulledFrame]]:
    """Inverse of `pack_pull`. Raises: ContractError."""
    what = "the response is not a batch"
    header, *frames = unpacked(data, _PULL, what)
    return from_map(header, dict[str, Any], what), from_map(frames, list[PulledFrame], what)


def unpack_group(frame: bytes | memoryview) -> Group:
    """The group in one frame; its arrays are read-only views into `frame`. Raises: ContractError."""
    packed, body = frame_parts(frame, KIND_GROUP)
    header = _checked_header(packed, len(body))
    columns: dict[str, Any] = {}
    start, num_tokens = 4 * header.num_prompt, header.num_tokens
    for name, kind in PER_TOKEN.items():
        columns[name] = np.frombuffer(body, kind, num_tokens, start)
        start += columns[name].nbytes
    if (end := start + 4 * header.num_context) < len(body):
        columns["teacher_logprobs"] = np.frombuffer(body, _F4, num_tokens, end)
    return Group(
        **{name: getattr(header, name) for name in _COMMON},
        **columns,
        purpose=header.purpose,
        prompt_token_ids=np.frombuffer(body, _I4, header.num_prompt),
        lengths=np.frombuffer(header.lengths_i4, _I4),
        rewards=np.frombuffer(header.rewards_f4, _F4),
        outcomes=np.frombuffer(header.outcomes, np.uint8),
        versions=_pairs(header.versions_i4),
        spans=None if header.spans_i4 is msgspec.UNSET else _pairs(header.spans_i4),
        turns=header.turns,
        context_ids=None if header.turns is None else np.frombuffer(body, _I4, header.num_context, start),
        reward_details=header.details,
    )


def _pairs(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, _I4).reshape(-1, 2)


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
    return b"".join([frame_start(KIND_BATCH, header, sum(map(len, frames))), *frames])


_BATCH = msgspec.msgpack.Decoder(BatchHeader)


def unpack_batch(frame: bytes | memoryview) -> Batch:
    """The batch in one frame. Raises: ContractError."""
    packed, body = frame_parts(frame, KIND_BATCH)
    header = unpacked(packed, _BATCH, "batch header")
    groups = [unpack_group(part) for part in split_frames(body)]
    return Batch(
        step=header.step,
        entries=tuple(entries_of(header, groups)),
        r_tot=header.r_tot,
        facts=header.facts,
        results=tuple(map(result_from_map, header.results)),
    )


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


_STORED_AS = {"group_id": "id", "worker_id": "worker", "rewards_f4": "rewards", "details_f4": "details"} | {
    f"{name}_i4": name for name in ("lengths", "versions", "spans", "turns")
}


class GroupHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_STORED_AS):
    """The header of a group frame, as it is stored: it is read without touching the tokens."""

    group_id: str
    prompt: Prompt
    purpose: Purpose
    step: int
    label: str
    worker_id: str
    num_prompt: int
    """Tokens of the prompt."""
    lengths_i4: bytes
    """[G]"""
    rewards_f4: bytes
    """[G]"""
    outcomes: bytes
    """[G] values of Outcome, one byte per response."""
    versions_i4: bytes
    """[G, 2]"""
    timing: Timing
    spans_i4: bytes | msgspec.UnsetType = msgspec.UNSET
    """[S, 2], only when several policy versions sampled a response."""
    turns_i4: bytes | msgspec.UnsetType = msgspec.UNSET
    """[U, 4], only when a response has several turns."""
    details_f4: dict[str, bytes] | msgspec.UnsetType = msgspec.UNSET
    """[G] each, only when there are any."""

    # For G entries numpy's calls cost more than what they do.

    @property
    def lengths(self) -> tuple[int, ...]:
        return _numbers("i", self.lengths_i4)

    @property
    def rewards(self) -> tuple[float, ...]:
        return _numbers("f", self.rewards_f4)

    @property
    def versions(self) -> tuple[int, ...]:
        """[2 G] oldest and newest of each response."""
        return _numbers("i", self.versions_i4)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all responses."""
        return sum(self.lengths)

    @property
    def turns(self) -> np.ndarray[Any, Any] | None:
        """[U, 4] `Group.turns`."""
        return None if self.turns_i4 is msgspec.UNSET else np.frombuffer(self.turns_i4, _I4).reshape(-1, TURN_COLUMNS)

    @property
    def details(self) -> dict[str, np.ndarray[Any, Any]]:
        """[G] each: `Group.reward_details`."""
        stored = {} if self.details_f4 is msgspec.UNSET else self.details_f4
        return {name: np.frombuffer(data, _F4) for name, data in stored.items()}

    @property
    def num_context(self) -> int:
        """Context tokens of all turns."""
        return 0 if self.turns is None else int(self.turns[:, 2].sum(dtype=np.int64))

    @property
    def policy_version(self) -> int:
        """Oldest version that sampled any token."""
        return min(self.versions[0::2])

    @property
    def newest_version(self) -> int:
        return max(self.versions[1::2])


_GROUP = msgspec.msgpack.Decoder(GroupHeader)


def _numbers(kind: str, data: bytes) -> tuple[Any, ...]:
    return _layout(kind, len(data) // 4).unpack(data)


@lru_cache(maxsize=256)
def _layout(kind: str, size: int) -> struct.Struct:
    return struct.Struct(f"<{size}{kind}")


def _checked_header(packed: memoryview, num_body_bytes: int) -> GroupHeader:
    """Raises: ContractError."""
    header = unpacked(packed, _GROUP, "group header")
    size = len(header.outcomes)
    sizes = [len(header.lengths_i4), len(header.rewards_f4), size, len(header.versions_i4)]
    if size == 0 or sizes != [4 * size, 4 * size, size, 8 * size]:
        raise ContractError(f"group header: columns of {sizes} bytes do not describe the same responses", Refusal.SHAPE)
    if header.details_f4 is not msgspec.UNSET:
        if odd := [name for name, data in header.details_f4.items() if len(data) != 4 * size]:
            message = f"group {header.group_id}: details {odd[0]!r:.100} are not those of {size} responses"
            raise ContractError(message, Refusal.SHAPE)
        require_details(header.group_id, header.details, size)
    if header.turns_i4 is not msgspec.UNSET and len(header.turns_i4) % (4 * TURN_COLUMNS):
        message = f"group {header.group_id}: turns of {len(header.turns_i4)} bytes are not rows of {TURN_COLUMNS}"
        raise ContractError(message, Refusal.SHAPE)
    _require_plausible(header, num_body_bytes)
    if header.spans_i4 is not msgspec.UNSET:
        if len(header.spans_i4) % 8:
            message = f"group {header.group_id}: spans of {len(header.spans_i4)} bytes are not pairs"
            raise ContractError(message, Refusal.VERSIONS)
        lengths = np.frombuffer(header.lengths_i4, _I4)
        require_spans(header.group_id, _pairs(header.spans_i4), lengths, _pairs(header.versions_i4))
    return header


def _require_plausible(header: GroupHeader, num_body_bytes: int) -> None:
    """Raises: ContractError for numbers that no correct worker sends."""
    where, lengths, rewards = f"group {header.group_id}", header.lengths, header.rewards
    versions, num_tokens = header.versions, sum(lengths)
    if min(lengths) < 1 or header.num_prompt < 0:
        raise ContractError(f"{where}: a response or the prompt has a negative or zero length", Refusal.SHAPE)
    if (turns := header.turns) is not None:
        has_prompt = header.num_prompt > 0
        require_turns(header.group_id, turns, header.num_context, lengths, has_prompt=has_prompt)
    num_plain_bytes = 4 * (header.num_prompt + header.num_context) + _TOKEN_BYTES * num_tokens
    if num_body_bytes not in (num_plain_bytes, num_plain_bytes + _F4.itemsize * num_tokens):  # without, with a teacher
        raise ContractError(f"{where}: {num_body_bytes} body bytes for {num_tokens} tokens", Refusal.SHAPE)
    # A NaN may hide from min and max, but not from a sum.
    are_shares = math.isfinite(sum(rewards)) and min(rewards) >= 0.0 and max(rewards) <= 1.0
    if not are_shares or max(header.outcomes) > Outcome.EXPERT:
        raise ContractError(f"{where}: rewards must be in [0, 1] and outcomes 0 to 2", Refusal.REWARDS)
    oldest, newest = versions[0::2], versions[1::2]
    if min(oldest) < 0 or any(map(operator.gt, oldest, newest)):
        raise ContractError(f"{where}: versions {list(versions)} are not pairs (oldest, newest)", Refusal.VERSIONS)


_PROMPT = msgspec.msgpack.Decoder(Prompt)
_PROMPT_ID = re.compile(PROMPT_ID)
_OPTIONAL_KEYS = {"item", "rows", "kind", "outcomes", "reward_details"}
_RESULT_KEYS = tuple(field.name for field in fields(GroupResult) if field.name not in _OPTIONAL_KEYS)


def require_carried(prompt: Prompt) -> None:
    """Refuse a prompt that the buffer or a group's header would refuse, hours later and without its place in a file.

    Raises: ContractError.
    """
    where = f"prompt {prompt.prompt_id[:200]!r}"
    if not _PROMPT_ID.fullmatch(prompt.prompt_id):
        raise ContractError(f"{where}: an id must have 1 to 128 visible ASCII characters", Refusal.NAME)
    try:
        packed = pack(prompt)
    except UnicodeEncodeError as error:
        raise ContractError(f"{where} has half a character: {error}", Refusal.HEADER) from error
    unpacked(packed, _PROMPT, where)
    if len(packed) > MAX_PROMPT_BYTES:
        raise ContractError(
            f"{where} has {len(packed)} bytes with its answer and columns, more than {MAX_PROMPT_BYTES}: every group "
            "of the prompt repeats them",
            Refusal.HEADER,
        )


def request_from_map(values: Any) -> RolloutRequest:
    """Inverse of `to_map`. Raises: ContractError."""
    if isinstance(values, dict) and "purpose" in values:
        purpose_of(values["purpose"])  # names the words that there are
    request = from_map(values, RolloutRequest, "request")
    if request.problem:
        raise ContractError(f"request {request.request_id}: {request.problem}", Refusal.HEADER)
    return request


def result_map(result: GroupResult) -> dict[str, Any]:
    """A result as a map. Fields of groups that train in parts, and outcomes, are left out where they say nothing."""
    values = {name: getattr(result, name) for name in _RESULT_KEYS}
    if result.item:
        values |= {"item": result.item, "rows": result.rows, "kind": result.kind}
    if result.outcomes:
        values["outcomes"] = list(result.outcomes)
    if result.reward_details:
        values["reward_details"] = dict(result.reward_details)
    return values


def result_from_map(values: Mapping[str, Any]) -> GroupResult:
    """Inverse of `result_map`. Raises: ContractError."""
    if not isinstance(values, Mapping) or set(values) - _OPTIONAL_KEYS != set(_RESULT_KEYS):
        raise ContractError(f"a result must be a map with the keys {sorted(_RESULT_KEYS)}, got {values!r:.200}")
    try:
        return msgspec.convert({**values, "outcomes": bytes(list(values.get("outcomes") or ()))}, GroupResult)
    except (TypeError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise ContractError(f"a result is malformed: {error}") from error
