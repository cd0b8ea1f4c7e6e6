"""Buffer values <-> msgpack, as stored in Redis.

Most are encoded by type; tables are rows, because they may contain thousands of groups.
"""

from __future__ import annotations

import struct
from dataclasses import astuple
from functools import lru_cache
from typing import Any

import msgspec

from bapo.core.errors import ContractError
from bapo.core.types import GroupResult, GroupStat, HardPrompt, Prompt, RolloutRequest
from bapo.transport.messages import ExtraRound
from buffer_service.state import BatchRecord, Demand, GroupRecord, Tables

_ENCODER = msgspec.msgpack.Encoder()
_REQUEST = msgspec.msgpack.Decoder(RolloutRequest)
unpack = msgspec.msgpack.decode
unpack_batch_record = msgspec.msgpack.Decoder(BatchRecord).decode
unpack_prompt = msgspec.msgpack.Decoder(Prompt).decode
unpack_record = msgspec.msgpack.Decoder(GroupRecord).decode
unpack_result = msgspec.msgpack.Decoder(GroupResult).decode


def pack(value: Any) -> bytes:
    """Pack any value except tables. Raises: ContractError for integers beyond 64 bits and text that is not UTF-8."""
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ContractError(f"a value cannot be stored: {error}") from error


def unpack_request(data: bytes, attempts: int = 0) -> RolloutRequest:
    """Unpack a request. Its attempts are stored in a separate hash."""
    return msgspec.structs.replace(_REQUEST.decode(data), attempts=attempts)


def pack_tables(tables: Tables) -> bytes:
    """Pack tables: two lists of rows, the numbers and the demand of the next step."""
    bad = [(entry.prompt_id, entry.birth, entry.mu, entry.attempts) for entry in tables.bad]
    # Rewards as single-precision floats: thousands of groups may be written at every step.
    high = [
        (stat.group_id, stat.prompt_id, stat.policy_version, stat.size, stat.reward_sum, stat.homogeneous, stat.birth,
         _floats(len(stat.rewards)).pack(*stat.rewards), stat.outcomes)
        for stat in tables.high
    ]  # fmt: skip
    demand = None if tables.demand is None else astuple(tables.demand)
    numbers = (tables.step, tables.r_tot, dict(tables.facts))
    extra = [(e.step, e.round, e.first, e.size) for e in tables.extra_rounds]
    return pack((*numbers, bad, high, tables.edits, tables.num_extra, demand, extra))


def unpack_tables(data: bytes) -> Tables:
    """Inverse of `pack_tables`; empty bytes are the tables before the first step."""
    if not data:
        return Tables()
    step, r_tot, facts, bad, high, edits, num_extra, demand, extra = unpack(data)
    return Tables(
        step=step,
        r_tot=r_tot,
        facts=facts,
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
