"""Values of the buffer <-> msgpack: what the Redis store and snapshots hold.

Rows instead of maps where there are many of a kind: the order of fields is the format.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import astuple, fields
from functools import lru_cache
from typing import Any

import msgpack
import msgspec

from bapo.core.codec import fate_from_map, fate_map, prompt_from_map, prompt_map, request_from_map, request_map
from bapo.core.errors import ContractError
from bapo.core.types import Fate, GroupStat, HardPrompt, Prompt, RolloutRequest
from bapo.transport.messages import ExtraRound
from buffer_service.state import BatchRecord, Demand, GroupRecord, Tables

_ENCODER, _RECORD = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(GroupRecord)


def pack(value: Any) -> bytes:
    """Any plain value. Raises: ContractError for what msgpack has no word for: integers beyond 64 bits, broken text."""
    return _packed(value, msgpack.packb)


def _pack_our_own(value: Any) -> bytes:
    """`pack` of what this service has made, several times faster: msgspec has a word for sets, too, which would come
    back as lists."""
    return _packed(value, _ENCODER.encode)


def _packed(value: Any, encode: Callable[[Any], bytes]) -> bytes:
    try:
        return encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ContractError(f"a value cannot be stored: {error}") from error


def unpack(data: bytes | memoryview) -> Any:
    """Inverse of `pack`. Lists come back as lists; integer keys of maps are allowed."""
    return msgpack.unpackb(data, strict_map_key=False)


def pack_request(request: RolloutRequest) -> bytes:
    """A request as a row, its prompt's fields after its id; its attempts are kept elsewhere."""
    values = request_map(request)
    prompt, request_id = values.pop("prompt"), values.pop("request_id")
    del values["attempts"]
    return pack((request_id, *prompt.values(), *values.values()))


def unpack_request(data: bytes, attempts: int = 0) -> RolloutRequest:
    """Inverse of `pack_request`."""
    request_id, *row = unpack(data)
    prompt = dict(zip(_PROMPT_KEYS, row, strict=False))
    rest = dict(zip(_REQUEST_KEYS, row[len(prompt) :], strict=True))
    return request_from_map({"request_id": request_id, "prompt": prompt, **rest, "attempts": attempts})


_PROMPT_KEYS = Prompt.__struct_fields__
_REQUEST_KEYS = [
    field.name for field in fields(RolloutRequest) if field.name not in ("request_id", "prompt", "attempts")
]


def pack_prompt(prompt: Prompt) -> bytes:
    """A prompt."""
    return pack(prompt_map(prompt))


def unpack_prompt(data: bytes) -> Prompt:
    """Inverse of `pack_prompt`."""
    return prompt_from_map(unpack(data))


def pack_fate(fate: Fate) -> bytes:
    """A fate."""
    return pack(fate_map(fate))


def unpack_fate(data: bytes) -> Fate:
    """Inverse of `pack_fate`."""
    return fate_from_map(unpack(data))


def pack_record(record: GroupRecord) -> bytes:
    """A record as a row. Raises: as `pack`."""
    return _pack_our_own(record)


def unpack_record(data: bytes) -> GroupRecord:
    """Inverse of `pack_record`."""
    return _RECORD.decode(data)


def pack_tables(tables: Tables) -> bytes:
    """Tables: two lists of rows, six numbers and the demand of the step that is next."""
    bad = [(entry.prompt_id, entry.birth, entry.mu, entry.attempts) for entry in tables.bad]
    # Rewards as single floats: a memory of thousands of groups is written at every step.
    high = [
        (stat.group_id, stat.prompt_id, stat.policy_version, stat.size, stat.reward_sum, stat.homogeneous, stat.birth,
         _floats(len(stat.rewards)).pack(*stat.rewards), stat.outcomes)
        for stat in tables.high
    ]  # fmt: skip
    demand = None if tables.demand is None else astuple(tables.demand)
    numbers = (tables.step, tables.r_tot, tables.c2, tables.c3)
    extra = [(e.step, e.round, e.first, e.size) for e in tables.extra_rounds]
    return _pack_our_own((*numbers, bad, high, tables.edits, tables.num_extra, demand, extra))


def unpack_tables(data: bytes) -> Tables:
    """Inverse of `pack_tables`; no bytes are the tables before the first step."""
    if not data:
        return Tables()
    step, r_tot, c2, c3, bad, high, edits, num_extra, demand, extra = unpack(data)
    return Tables(
        step=step,
        r_tot=r_tot,
        c2=c2,
        c3=c3,
        bad=tuple(HardPrompt(prompt_id=row[0], birth=row[1], mu=row[2], attempts=row[3]) for row in bad),
        high=tuple(_stat(row) for row in high),
        edits=edits,
        num_extra=num_extra,
        demand=None if demand is None else Demand(*demand),
        extra_rounds=tuple(ExtraRound(step=e[0], round=e[1], first=e[2], size=e[3]) for e in extra),
    )


@lru_cache(maxsize=64)
def _floats(number: int) -> struct.Struct:
    return struct.Struct(f"<{number}f")


def _stat(row: list[Any]) -> GroupStat:
    rewards, outcomes = row[7:]
    return GroupStat(
        group_id=row[0],
        prompt_id=row[1],
        policy_version=row[2],
        size=row[3],
        reward_sum=row[4],
        homogeneous=row[5],
        birth=row[6],
        rewards=_floats(len(rewards) // 4).unpack(rewards),
        outcomes=outcomes,
    )


def pack_batch_record(record: BatchRecord) -> bytes:
    """A batch without its frames."""
    return _pack_our_own((record.step, record.group_ids, record.header, record.num_bytes, record.untrained))


def unpack_batch_record(data: bytes) -> BatchRecord:
    """Inverse of `pack_batch_record`."""
    step, group_ids, header, num_bytes, untrained = unpack(data)
    return BatchRecord(
        step=step,
        group_ids=tuple(group_ids),
        header=header,
        num_bytes=num_bytes,
        untrained=tuple(untrained),
    )


def pack_line(line: Mapping[str, Any]) -> bytes:
    """One line of `GET /batches`."""
    return pack(dict(line))
