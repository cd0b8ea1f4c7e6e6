"""The header of a group frame: everything that a rule needs, read and checked without touching a token."""

from __future__ import annotations

import math
import operator
import struct
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from bapo.errors import ContractError, Refusal
from bapo.frames import unpack_plain
from bapo.maps import require_answer
from bapo.spans import require_spans
from bapo.types import GroupStat, Outcome, Prompt, Purpose, Timing, stat_of


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


class _PromptFields(msgspec.Struct, forbid_unknown_fields=True):
    prompt_id: str
    text: str
    task: str
    answer: msgspec.Raw


class HeaderFields(msgspec.Struct, forbid_unknown_fields=True):
    """A header as it lies in its frame: each key with its type, the columns as bytes, which nobody has looked at."""

    id: str
    prompt: _PromptFields
    purpose: Purpose
    step: int
    label: str
    worker: str
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
    """Plain numbers and no arrays: for columns of G entries numpy's calls cost more than what they do.

    Raises: ContractError.
    """
    size = len(fields.rewards) // 4
    sizes = [len(fields.lengths), len(fields.rewards), len(fields.outcomes), len(fields.versions)]
    if size == 0 or sizes != [4 * size, 4 * size, size, 8 * size]:
        raise ContractError(f"group header: columns of {sizes} bytes do not describe the same responses", Refusal.SHAPE)
    ints, floats, pairs = _formats(size)
    lengths, rewards, versions = ints(fields.lengths), floats(fields.rewards), pairs(fields.versions)
    num_tokens, outcomes = sum(lengths), fields.outcomes
    if min(lengths) < 1 or fields.num_prompt < 0:
        raise ContractError(f"group {fields.id}: a response or the prompt has a negative or zero length", Refusal.SHAPE)
    if num_body_bytes != 4 * fields.num_prompt + 8 * num_tokens:
        raise ContractError(f"group {fields.id}: {num_body_bytes} body bytes for {num_tokens} tokens", Refusal.SHAPE)
    # A NaN may hide from min and max, but not from a sum.
    if (
        not (math.isfinite(sum(rewards)) and min(rewards) >= 0.0 and max(rewards) <= 1.0)
        or max(outcomes) > Outcome.EXPERT
    ):
        raise ContractError(f"group {fields.id}: rewards must be in [0, 1] and outcomes 0 to 2", Refusal.REWARDS)
    oldest, newest = versions[0::2], versions[1::2]
    if min(oldest) < 0 or any(map(operator.gt, oldest, newest)):
        raise ContractError(
            f"group {fields.id}: versions {list(versions)} are not pairs (oldest, newest)", Refusal.VERSIONS
        )
    if fields.spans is not msgspec.UNSET:
        _check_spans(fields, fields.spans, size)
    return GroupHeader(
        group_id=fields.id,
        prompt=_prompt(fields.prompt),
        purpose=fields.purpose,
        step=fields.step,
        label=fields.label,
        worker_id=fields.worker,
        num_prompt=fields.num_prompt,
        lengths=lengths,
        rewards=rewards,
        policy_version=min(oldest),
        newest_version=max(newest),
        num_tokens=num_tokens,
        outcomes=outcomes,
        timing=_timing(fields),
    )


@lru_cache(maxsize=64)
def _formats(size: int) -> tuple[Any, Any, Any]:
    """What unpacks lengths, rewards and versions of so many responses."""
    ints, floats, pairs = (struct.Struct(f"<{layout}") for layout in (f"{size}i", f"{size}f", f"{2 * size}i"))
    return ints.unpack, floats.unpack, pairs.unpack


def _check_spans(fields: HeaderFields, spans: bytes, size: int) -> None:
    """Only of responses that several versions sampled, so arrays may cost what they cost."""
    if len(spans) % 8:
        raise ContractError(f"group {fields.id}: spans of {len(spans)} bytes are no pairs", Refusal.VERSIONS)
    rows, lengths, pairs = (np.frombuffer(data, "<i4") for data in (spans, fields.lengths, fields.versions))
    require_spans(fields.id, rows.reshape(-1, 2), lengths, pairs.reshape(size, 2))


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


def _prompt(fields: _PromptFields) -> Prompt:
    answer = require_answer(unpack_plain(memoryview(fields.answer)))
    return Prompt(prompt_id=fields.prompt_id, text=fields.text, task=fields.task, answer=answer)


def _timing(fields: HeaderFields) -> Timing:
    for name, value in zip(Timing.__struct_fields__, fields.timing, strict=True):
        if not 0.0 <= value < math.inf:
            message = f"group {fields.id}: timing.{name} is {value}, which is no finite number from 0 on"
            raise ContractError(message, Refusal.HEADER)
    claimed_at, sample_s, grade_s = fields.timing
    return Timing(claimed_at=claimed_at, sample_s=sample_s, grade_s=grade_s)
