"""The header of a group frame: everything that a rule needs, read and checked without touching a token."""

from __future__ import annotations

import math
import operator
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from bapo.errors import ContractError, Refusal
from bapo.maps import prompt_from_map
from bapo.spans import require_spans
from bapo.types import GroupStat, Outcome, Prompt, Purpose, Timing, stat_of


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
    outcomes: bytes
    """[G] values of Outcome, one byte per response."""
    timing: Timing

    @property
    def num_truncated(self) -> int:
        """Responses that reached the length limit."""
        return self.outcomes.count(Outcome.TRUNCATED)

    @property
    def stat(self) -> GroupStat:
        """What the composer needs."""
        return stat_of(
            group_id=self.group_id,
            prompt_id=self.prompt.prompt_id,
            policy_version=self.policy_version,
            rewards=self.rewards,
            outcomes=self.outcomes,
        )


SPANS = "spans"
"""Key of a group's header that is there only when several policy versions sampled a response."""
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


def checked_header(header: dict[str, Any], num_body_bytes: int) -> GroupHeader:
    """Plain numbers and no arrays: for columns of G entries numpy's calls cost more than what they do."""
    types = _GROUP_TYPES if SPANS not in header else {**_GROUP_TYPES, SPANS: bytes}
    require_types(header, types, "group")
    size = len(header["rewards"]) // 4
    sizes = [len(header[key]) for key in ("lengths", "rewards", "outcomes", "versions")]
    if size == 0 or sizes != [4 * size, 4 * size, size, 8 * size]:
        raise ContractError(f"group header: columns of {sizes} bytes do not describe the same responses", Refusal.SHAPE)
    lengths, rewards = struct.unpack(f"<{size}i", header["lengths"]), struct.unpack(f"<{size}f", header["rewards"])
    versions, outcomes = struct.unpack(f"<{2 * size}i", header["versions"]), header["outcomes"]
    num_tokens = sum(lengths)
    if min(lengths) < 1 or header["num_prompt"] < 0:
        raise ContractError(
            f"group {header['id']}: a response or the prompt has a negative or zero length", Refusal.SHAPE
        )
    if num_body_bytes != 4 * header["num_prompt"] + 8 * num_tokens:
        raise ContractError(f"group {header['id']}: {num_body_bytes} body bytes for {num_tokens} tokens", Refusal.SHAPE)
    # A NaN may hide from min and max, but not from a sum.
    if (
        not (math.isfinite(sum(rewards)) and min(rewards) >= 0.0 and max(rewards) <= 1.0)
        or max(outcomes) > Outcome.EXPERT
    ):
        raise ContractError(f"group {header['id']}: rewards must be in [0, 1] and outcomes 0 to 2", Refusal.REWARDS)
    oldest, newest = versions[0::2], versions[1::2]
    if min(oldest) < 0 or any(map(operator.gt, oldest, newest)):
        raise ContractError(
            f"group {header['id']}: versions {list(versions)} are not pairs (oldest, newest)", Refusal.VERSIONS
        )
    if SPANS in header:
        _check_spans(header, size)
    return GroupHeader(
        group_id=header["id"],
        prompt=prompt_from_map(header["prompt"]),
        purpose=_purpose(header["purpose"]),
        step=header["step"],
        label=header["label"],
        worker_id=header["worker"],
        lengths=lengths,
        rewards=rewards,
        policy_version=min(oldest),
        newest_version=max(newest),
        num_tokens=num_tokens,
        outcomes=outcomes,
        timing=_timing(header["timing"]),
    )


def _check_spans(header: dict[str, Any], size: int) -> None:
    """Only of responses that several versions sampled, so arrays may cost what they cost."""
    if len(header[SPANS]) % 8:
        raise ContractError(f"group {header['id']}: spans of {len(header[SPANS])} bytes are no pairs", Refusal.VERSIONS)
    spans, lengths, pairs = (np.frombuffer(header[key], "<i4") for key in (SPANS, "lengths", "versions"))
    require_spans(header["id"], spans.reshape(-1, 2), lengths, pairs.reshape(size, 2))


def require_types(header: dict[str, Any], types: dict[str, type | tuple[type, ...]], kind: str) -> None:
    """Refuse a header with other keys, or with values of other types. Raises: ContractError."""
    if header.keys() != types.keys():
        raise ContractError(
            f"{kind} header has the keys {sorted(map(str, header))}, expected {sorted(types)}", Refusal.HEADER
        )
    for key, wanted in types.items():
        if not isinstance(header[key], wanted):
            raise ContractError(
                f"{kind} header: {key} must be {wanted}, got {type(header[key]).__name__}", Refusal.HEADER
            )


PURPOSES = {purpose.value: purpose for purpose in Purpose}
"""Found in a third of the time that the class itself needs: every group is asked, pushed and assembled."""


def _purpose(name: str) -> Purpose:
    purpose = PURPOSES.get(name)
    if purpose is None:
        raise ContractError(f"unknown purpose {name!r}", Refusal.HEADER)
    return purpose


def _timing(values: list[Any]) -> Timing:
    is_plain = list(map(type, values)) == [float, float, float] and math.isfinite(sum(values))
    if not is_plain and (
        len(values) != 3 or not all(isinstance(value, float | int) and math.isfinite(value) for value in values)
    ):
        raise ContractError("timing must be three finite numbers", Refusal.HEADER)
    return Timing(claimed_at=float(values[0]), sample_s=float(values[1]), grade_s=float(values[2]))
