"""Group and batch frames: what travels between workers, buffer and learner.

The header of a group holds everything that a rule needs (ids, rewards, versions, lengths); the body holds the
columns of tokens as little-endian arrays: prompt ids i32 [P], token ids i32 [T], log-probs f32 [T]. So the buffer
service classifies a group by reading its header alone, in the same time for 8 as for 8192 tokens per response.
The header of a batch holds its numbers, origins and fates; its body is the frames of its groups, in order.

Covers: packing, unpacking, splitting a stream of frames, refusing anything unknown or truncated (ContractError).
Does not cover: compression, encryption, older formats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bapo.errors import ContractError
from bapo.frames import KIND_BATCH, KIND_GROUP, frame_start, open_frame, split_frames
from bapo.maps import fate_from_map, fate_map, prompt_from_map, prompt_map
from bapo.types import Batch, BatchEntry, Group, GroupStat, Origin, Prompt, Purpose, Timing

__all__ = [
    "GroupHeader",
    "batch_header",
    "fate_from_map",
    "fate_map",
    "pack_batch",
    "pack_batch_frames",
    "pack_batch_start",
    "pack_group",
    "prompt_from_map",
    "prompt_map",
    "read_group_header",
    "split_frames",
    "unpack_batch",
    "unpack_group",
]


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
    body = [
        _bytes(group.prompt_token_ids, "<i4"),
        _bytes(group.token_ids, "<i4"),
        _bytes(group.rollout_logprobs, "<f4"),
    ]
    return b"".join([frame_start(KIND_GROUP, header, sum(map(len, body))), *body])


def read_group_header(frame: bytes | memoryview) -> GroupHeader:
    """The header of a group frame, with its lengths checked against the size of the body.

    Raises: ContractError for anything that `pack_group` could not have written.
    """
    header, body = open_frame(frame, KIND_GROUP)
    return _checked_header(header, len(body))


def unpack_group(frame: bytes | memoryview) -> Group:
    """The group in one frame; its arrays are read-only views into `frame`.

    Raises: ContractError.
    """
    header, body = open_frame(frame, KIND_GROUP)
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
    return b"".join([pack_batch_start(header, sum(map(len, frames))), *frames])


def pack_batch_start(header: Mapping[str, Any], num_body_bytes: int) -> bytes:
    """What precedes the groups' frames in a batch frame, so that a server can send them as it reads them."""
    return frame_start(KIND_BATCH, header, num_body_bytes)


def unpack_batch(frame: bytes | memoryview) -> Batch:
    """The batch in one frame.

    Raises: ContractError.
    """
    header, body = open_frame(frame, KIND_BATCH)
    _require_types(header, _BATCH_TYPES, "batch")
    if not all(math.isfinite(header[name]) for name in _BATCH_RATIOS):
        raise ContractError(f"batch {header['step']}: {', '.join(_BATCH_RATIOS)} must be finite")
    groups = [unpack_group(part) for part in split_frames(body)]
    if len(header["origins"]) != len(groups):
        raise ContractError(f"batch {header['step']}: {len(header['origins'])} origins but {len(groups)} groups")
    entries = zip(header["origins"], groups, strict=True)
    return Batch(
        step=header["step"],
        entries=tuple(BatchEntry(origin=_origin(name), group=group) for name, group in entries),
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
_GROUP_TYPES: dict[str, type | tuple[type, ...]] = {
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
    _require_types(header, _GROUP_TYPES, "group")
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
    oldest, newest = versions[0::2], versions[1::2]
    if int(oldest.min()) < 0 or bool(np.any(oldest > newest)):
        raise ContractError(f"group {header['id']}: versions {versions.tolist()} are not pairs (oldest, newest)")
    return GroupHeader(
        group_id=header["id"],
        prompt=prompt_from_map(header["prompt"]),
        purpose=_purpose(header["purpose"]),
        step=header["step"],
        label=header["label"],
        worker_id=header["worker"],
        lengths=tuple(lengths.tolist()),
        rewards=tuple(rewards.tolist()),
        policy_version=int(oldest.min()),
        newest_version=int(newest.max()),
        num_tokens=num_tokens,
        num_truncated=int(outcomes.sum()),
        timing=_timing(header["timing"]),
    )


def _require_types(header: dict[str, Any], types: dict[str, type | tuple[type, ...]], kind: str) -> None:
    if header.keys() != types.keys():
        raise ContractError(f"{kind} header has the keys {sorted(map(str, header))}, expected {sorted(types)}")
    for key, wanted in types.items():
        if not isinstance(header[key], wanted):
            raise ContractError(f"{kind} header: {key} must be {wanted}, got {type(header[key]).__name__}")


def _origin(name: Any) -> Origin:
    try:
        return Origin(name)
    except ValueError as error:
        raise ContractError(f"unknown origin {name!r}") from error


def _purpose(name: str) -> Purpose:
    try:
        return Purpose(name)
    except ValueError as error:
        raise ContractError(f"unknown purpose {name!r}") from error


def _timing(values: list[Any]) -> Timing:
    if len(values) != 3 or not all(isinstance(value, float | int) and math.isfinite(value) for value in values):
        raise ContractError("timing must be three finite numbers")
    return Timing(claimed_at=float(values[0]), sample_s=float(values[1]), grade_s=float(values[2]))


def _bytes(array: np.ndarray[Any, Any], dtype: str) -> bytes:
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def _array(data: bytes, dtype: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, dtype)
