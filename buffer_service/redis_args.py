"""Values as arguments of scripts, many of a kind as columns: taking one by one costs Lua more than using it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from bapo.types import RolloutRequest
from buffer_service.codec import pack_record, pack_request
from buffer_service.groups import Incoming, request_terms
from buffer_service.redis_sockets import Arg


def group_args(groups: Sequence[Incoming], ranks: Iterable[int]) -> list[Arg]:
    """For push.lua: how many groups, and their columns."""
    records = [group.record for group in groups]
    columns: list[Iterable[Arg]] = [
        (record.group_id for record in records),
        (record.terms for record in records),
        (record.policy_version for record in records),
        (record.worker_id for record in records),
        ranks,
        (len(group.frame) for group in groups),
        map(pack_record, records),
    ]
    return [len(groups), *chain.from_iterable(columns)]


def change_args(changes: Mapping[str, int]) -> tuple[list[Arg], list[str]]:
    """For commit_assembly.lua, from group id -> change of its references: (how many changes there are, and for each the
    groups that it concerns; the groups that lose references, in that order)."""
    by_change: dict[int, list[str]] = {}
    for group_id, change in changes.items():
        by_change.setdefault(change, []).append(group_id)
    args: list[Arg] = [len(by_change)]
    for change, group_ids in by_change.items():
        args += [change, len(group_ids), *group_ids]
    return args, [group_id for change, ids in by_change.items() if change < 0 for group_id in ids]


def request_args(requests: Iterable[RolloutRequest]) -> list[Arg]:
    """For enqueue.lua and others, one request after the other."""
    args: list[Arg] = []
    for request in requests:
        terms, blob = request_terms(request), pack_request(request)
        args += [request.purpose.value, request.min_version, request.request_id, terms, blob]
    return args
