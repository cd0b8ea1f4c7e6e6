"""Group and batch frames: what travels between workers, buffer and learner.

    frame = magic "BAPO" | format 1 | kind | header length (u32) | body length (u32) | header (msgpack map) | body

The header of a group holds everything that a rule needs (ids, rewards, versions, lengths); the body holds the
columns of tokens as little-endian arrays: prompt ids i32 [P], token ids i32 [T], log-probs f32 [T]. So the buffer
service classifies a group by reading its header alone, in the same time for 8 as for 8192 tokens per response.

Covers: packing, unpacking, splitting a stream of frames, refusing anything unknown or truncated (ContractError).
Does not cover: compression, encryption, older formats.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgpack
import numpy as np

from bapo.errors import ContractError
from bapo.types import (
    Batch,
    BatchEntry,
    Fate,
    Group,
    GroupStat,
    Origin,
    Prompt,
    Purpose,
    Timing,
)

MAGIC = b"BAPO"
FORMAT = 1
KIND_GROUP = 1
KIND_BATCH = 2
PREFIX = struct.Struct("<4sBBII")

MAX_HEADER_BYTES = 1 << 20
"""A group's header is some hundred bytes; a batch's has one line per group that assembly looked at."""
MAX_BODY_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHeader:
    """The header of a group frame, read without touching its tokens."""

    group_id: str
    prompt: Prompt
    purpose: Purpose
    step: int
    label: str
    worker_id: str
    lengths: tuple[int, ...]
    rewards: tuple[float, ...]
    policy_version: int
    """Oldest version that sampled any token."""
    newest_version: int
    num_tokens: int
    """Sampled tokens of all responses."""
    num_truncated: int
    timing: Timing

    @property
    def stat(self) -> GroupStat:
        """What the composer needs."""
        return GroupStat(
            group_id=self.group_id,
            prompt_id=self.prompt.prompt_id,
            policy_version=self.policy_version,
            size=len(self.rewards),
            reward_sum=float(sum(self.rewards)),
            homogeneous=min(self.rewards) == max(self.rewards),
        )


def pack_group(group: Group) -> bytes:
    """One group as one frame."""
    header = {
        "id": group.group_id,
        "prompt": prompt_map(group.prompt),
        "purpose": group.purpose.value,
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
    body = (
        _bytes(group.prompt_token_ids, "<i4") + _bytes(group.token_ids, "<i4") + _bytes(group.rollout_logprobs, "<f4")
    )
    return _frame(KIND_GROUP, header, body)


def read_group_header(frame: bytes | memoryview) -> GroupHeader:
    """The header of a group frame, with its lengths checked against the size of the body.

    Raises: ContractError for anything that `pack_group` could not have written.
    """
    header, body = _open_frame(frame, KIND_GROUP)
    return _checked_header(header, len(body))


def unpack_group(frame: bytes | memoryview) -> Group:
    """The group in one frame; its arrays are read-only views into `frame`.

    Raises: ContractError.
    """
    header, body = _open_frame(frame, KIND_GROUP)
    checked = _checked_header(header, len(body))
    num_prompt, num_tokens = header["num_prompt"], checked.num_tokens
    ids = np.frombuffer(body, "<i4", count=num_prompt + num_tokens)
    return Group(
        group_id=checked.group_id,
        prompt=checked.prompt,
        purpose=checked.purpose,
        step=checked.step,
        label=checked.label,
        worker_id=checked.worker_id,
        prompt_token_ids=ids[:num_prompt],
        token_ids=ids[num_prompt:],
        rollout_logprobs=np.frombuffer(body, "<f4", offset=4 * (num_prompt + num_tokens)),
        lengths=_array(header["lengths"], "<i4"),
        rewards=_array(header["rewards"], "<f4"),
        outcomes=_array(header["outcomes"], "u1"),
        versions=_array(header["versions"], "<i4").reshape(-1, 2),
        timing=checked.timing,
    )


def pack_batch(batch: Batch) -> bytes:
    """One batch as one frame whose body is its groups' frames, in order."""
    return pack_batch_frames(batch_header(batch), [pack_group(entry.group) for entry in batch.entries])


def batch_header(batch: Batch) -> dict[str, Any]:
    """The header of a batch frame: everything but the groups' own frames."""
    return {
        "step": batch.step,
        "origins": [entry.origin.value for entry in batch.entries],
        "r_tot": batch.r_tot,
        "c2": batch.c2,
        "c3": batch.c3,
        "num_bad": batch.num_bad,
        "num_high": batch.num_high,
        "fates": [fate_map(fate) for fate in batch.fates],
    }


def pack_batch_frames(header: Mapping[str, Any], frames: list[bytes]) -> bytes:
    """A batch frame from its header and stored group frames: the service never unpacks the groups."""
    return _frame(KIND_BATCH, header, b"".join(frames))


def pack_batch_start(header: Mapping[str, Any], num_body_bytes: int) -> bytes:
    """What precedes the groups' frames in a batch frame, so that a server can send them as it reads them."""
    return _frame_start(KIND_BATCH, header, num_body_bytes)


def unpack_batch(frame: bytes | memoryview) -> Batch:
    """The batch in one frame.

    Raises: ContractError.
    """
    header, body = _open_frame(frame, KIND_BATCH)
    groups = [unpack_group(part) for part in split_frames(body)]
    try:
        origins = [Origin(name) for name in header["origins"]]
        fates = tuple(fate_from_map(fields) for fields in header["fates"])
        numbers = {name: float(header[name]) for name in ("r_tot", "c2", "c3")}
        counts = {name: int(header[name]) for name in ("step", "num_bad", "num_high")}
    except (KeyError, TypeError, ValueError) as error:
        raise ContractError(f"batch header is malformed: {error!r}") from error
    if len(origins) != len(groups):
        raise ContractError(f"batch {counts['step']}: {len(origins)} origins but {len(groups)} groups")
    entries = tuple(BatchEntry(origin=o, group=g) for o, g in zip(origins, groups, strict=True))
    return Batch(entries=entries, fates=fates, **numbers, **counts)  # type: ignore[arg-type]


def split_frames(stream: bytes | memoryview) -> Iterator[memoryview]:
    """The frames that lie one after the other in `stream`.

    Raises: ContractError when the last one is cut off.
    """
    rest = memoryview(stream)
    while rest:
        size = _frame_size(rest)
        yield rest[:size]
        rest = rest[size:]


def fate_map(fate: Fate) -> dict[str, Any]:
    """A fate as a map of plain values."""
    fields = asdict(fate)
    fields["purpose"] = fate.purpose.value
    fields["origin"] = fate.origin.value if fate.origin else None
    fields["rewards"] = list(fate.rewards)
    return fields


def fate_from_map(fields: Mapping[str, Any]) -> Fate:
    """Inverse of `fate_map`. Raises KeyError, TypeError or ValueError on a map that it did not write."""
    values = dict(fields)
    values["purpose"] = Purpose(values["purpose"])
    values["origin"] = Origin(values["origin"]) if values["origin"] else None
    values["rewards"] = tuple(float(r) for r in values["rewards"])
    return Fate(**values)


def prompt_from_map(fields: Mapping[str, Any]) -> Prompt:
    """A prompt from its map. Raises: ContractError."""
    if set(fields) != {"prompt_id", "text", "task", "answer"}:
        raise ContractError(f"prompt has the keys {sorted(fields)}")
    if not all(isinstance(fields[key], str) for key in ("prompt_id", "text", "task")):
        raise ContractError("prompt_id, text and task must be strings")
    if not isinstance(fields["answer"], dict):
        raise ContractError("a prompt's answer must be a map")
    return Prompt(**fields)


def prompt_map(prompt: Prompt) -> dict[str, Any]:
    """A prompt as a map of plain values."""
    return {
        "prompt_id": prompt.prompt_id,
        "text": prompt.text,
        "task": prompt.task,
        "answer": dict(prompt.answer),
    }


_GROUP_TYPES: dict[str, type] = {
    "id": str,
    "prompt": dict,
    "purpose": str,
    "step": int,
    "label": str,
    "worker": str,
    "num_prompt": int,
    "lengths": bytes,
    "rewards": bytes,
    "outcomes": bytes,
    "versions": bytes,
    "timing": list,
}


def _checked_header(header: dict[str, Any], num_body_bytes: int) -> GroupHeader:
    if header.keys() != _GROUP_TYPES.keys():
        raise ContractError(f"group header has the keys {sorted(header)}, expected {sorted(_GROUP_TYPES)}")
    for key, kind in _GROUP_TYPES.items():
        if not isinstance(header[key], kind):
            raise ContractError(f"group header: {key} must be {kind.__name__}, got {type(header[key]).__name__}")
    size = len(header["rewards"]) // 4
    sizes = [len(header[key]) for key in ("lengths", "rewards", "outcomes", "versions")]
    if size == 0 or sizes != [4 * size, 4 * size, size, 8 * size]:
        raise ContractError(f"group header: columns of {sizes} bytes do not describe the same responses")
    lengths, rewards = _array(header["lengths"], "<i4"), _array(header["rewards"], "<f4")
    versions, outcomes = _array(header["versions"], "<i4"), _array(header["outcomes"], "u1")
    num_tokens = int(lengths.sum(dtype=np.int64))
    if int(lengths.min()) < 1 or header["num_prompt"] < 0:
        raise ContractError(f"group {header['id']}: a response or the prompt has a negative or zero length")
    if num_body_bytes != 4 * header["num_prompt"] + 8 * num_tokens:
        raise ContractError(f"group {header['id']}: {num_body_bytes} body bytes for {num_tokens} tokens")
    if not bool(np.all((rewards >= 0) & (rewards <= 1))) or int(outcomes.max()) > 1:
        raise ContractError(f"group {header['id']}: rewards must be in [0, 1] and outcomes 0 or 1")
    return GroupHeader(
        group_id=header["id"],
        prompt=prompt_from_map(header["prompt"]),
        purpose=_purpose(header["purpose"]),
        step=header["step"],
        label=header["label"],
        worker_id=header["worker"],
        lengths=tuple(lengths.tolist()),
        rewards=tuple(rewards.tolist()),
        policy_version=int(versions[0::2].min()),
        newest_version=int(versions[1::2].max()),
        num_tokens=num_tokens,
        num_truncated=int(outcomes.sum()),
        timing=_timing(header["timing"]),
    )


def _purpose(name: str) -> Purpose:
    try:
        return Purpose(name)
    except ValueError as error:
        raise ContractError(f"unknown purpose {name!r}") from error


def _timing(values: list[Any]) -> Timing:
    if len(values) != 3 or not all(isinstance(value, float | int) for value in values):
        raise ContractError("timing must be three numbers")
    return Timing(claimed_at=float(values[0]), sample_s=float(values[1]), grade_s=float(values[2]))


def _bytes(array: np.ndarray[Any, Any], dtype: str) -> bytes:
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def _array(data: bytes, dtype: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, dtype)


def _frame(kind: int, header: Mapping[str, Any], body: bytes) -> bytes:
    return _frame_start(kind, header, len(body)) + body


def _frame_start(kind: int, header: Mapping[str, Any], num_body_bytes: int) -> bytes:
    packed: bytes = msgpack.packb(header)
    return PREFIX.pack(MAGIC, FORMAT, kind, len(packed), num_body_bytes) + packed


def _frame_size(frame: memoryview) -> int:
    if len(frame) < PREFIX.size:
        raise ContractError(f"frame is cut off: {len(frame)} bytes, its prefix alone has {PREFIX.size}")
    magic, version, _, num_header, num_body = PREFIX.unpack_from(frame)
    if magic != MAGIC or version != FORMAT:
        raise ContractError(f"not a BAPO frame of format {FORMAT}: starts with {bytes(frame[:5])!r}")
    if num_header > MAX_HEADER_BYTES or num_body > MAX_BODY_BYTES:
        raise ContractError(f"frame of {num_header} + {num_body} bytes is larger than allowed")
    size = int(PREFIX.size + num_header + num_body)
    if len(frame) < size:
        raise ContractError(f"frame is cut off: {len(frame)} of {size} bytes")
    return size


def _open_frame(frame: bytes | memoryview, kind: int) -> tuple[dict[str, Any], memoryview]:
    view = memoryview(frame)
    size = _frame_size(view)
    if size != len(view):
        raise ContractError(f"{len(view) - size} bytes follow the frame")
    _, _, found, num_header, _ = PREFIX.unpack_from(view)
    if found != kind:
        raise ContractError(f"frame of kind {found} where kind {kind} was expected")
    packed = view[PREFIX.size : PREFIX.size + num_header]
    try:
        header = msgpack.unpackb(packed, max_map_len=1024, max_ext_len=0)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ContractError(f"frame header is not msgpack: {error!r}") from error
    if not isinstance(header, dict):
        raise ContractError("frame header is not a map")
    return header, view[PREFIX.size + num_header :]
