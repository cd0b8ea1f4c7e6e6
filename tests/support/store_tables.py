"""Everything that a store holds, laid bare in one form: the model's, and the keys of Redis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bapo.core.types import Purpose
from buffer_service.state import SelectorState
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.redis.keys import INDEX, Keys
from buffer_service.store.redis.rows import unpack_prompt, unpack_tables
from tests.support.store_model import Model

Held = dict[str, Any]


def held_by_model(model: Model) -> Held:
    """What the model says."""
    asked = {a.request.request_id: a for a in model.line}
    evaluated = {request_id for ids in model.evaluations.values() for request_id in ids}
    return {
        "queued": {p.value: [a.request.request_id for a in model.claim_order(p) if not a.holder] for p in Purpose},
        "leased": {key: a.holder for key, a in asked.items() if a.holder},
        "attempts": {key: a.attempts for key, a in asked.items() if a.attempts},
        "done": set(model.settled),
        "settled_at": {i: step for i, step in model.settled.items() if i not in evaluated},
        "planned": {key: a.request.step for key, a in asked.items() if a.request.purpose is Purpose.FRESH},
        "requests": {*asked, *dict(model.fresh)},
        "fresh": [group_id for group_id, _ in model.fresh_in_order],
        "reevaluated": list(model.reevaluated),
        "evaluated": {label: sorted(ids) for label, ids in model.evaluations.items()},
        "rounds": dict(model.rounds),
        "records": set(model.records),
        "refs": model.refs,
        "frames": model.frames,
        "bytes": sum(map(len, model.frames.values())),
        "fresh_bytes": model.fresh_bytes,
        "tables": model.tables,
        "bad_prompts": model.bad_prompts,
        "batches": set(model.batches),
        "num_compositions": len(model.compositions),
        "num_stale": len(model.stale),
        "counters": dict(model.counters),
        "success_counts": model.success_counts_of_steps,
        "selector": model.selector,
        "heard": set(model.heard),
        "claims": {
            worker: (nonce, [asked.request.request_id for asked in model.held_under(worker, nonce)])
            for worker, nonce in model.nonces.items()
            if nonce
        },
        "numbers": {
            "assembled": model.tables.step,
            "committed": model.committed,
            "checkpointed": model.checkpointed,
            "step": model.progress.step,
            "policy_version": model.progress.policy_version,
            "cursor": model.cursor,
            "fresh_dropped": model.fresh_dropped,
            "fresh_spares": model.fresh_spares,
            "failures_in_a_row": model.failures,
            "table_edits": model.tables.edits,
        },
        "last_failure": model.last_failure,
    }


NUMBERS = (
    "assembled",
    "committed",
    "checkpointed",
    "step",
    "policy_version",
    "cursor",
    "fresh_dropped",
    "fresh_spares",
    "failures_in_a_row",
    "table_edits",
)
SORTED_SETS = ("queue_fresh", "queue_reevaluate", "queue_evaluate", "fresh", "reevaluated", "done", "planned",
               "evaluated", "leases_fresh", "leases_reevaluate", "leases_evaluate", "heard")  # fmt: skip
HASHES = ("meta", "requests", "live", "holders", "held", "attempts", "evaluations", "rounds", "records", "refs",
          "bad_prompts", "batches", "counters", "success_counts", "claims")  # fmt: skip


def held_by_redis(link: RedisLink, run: str, *, on_their_way: bool = False) -> Held:
    """What the keys of a run say; asserts what must hold between them.

    Args:
        on_their_way: frames that were sent and not admitted may be there: they expire.
    """
    keys = Keys(run)
    pipe = link.client.pipeline(transaction=True)
    for name in SORTED_SETS:
        pipe.zrange(keys[name], 0, -1, withscores=True)
    for name in HASHES:
        pipe.hgetall(keys[name])
    pipe.llen(keys["compositions"])
    pipe.llen(keys["stale"])
    pipe.get(keys["tables"])
    pipe.get(keys["selector"])
    pipe.keys(f"bapo:{{{run}}}:*")
    replies = pipe.execute()
    sets = {
        name: [(key.decode(), score) for key, score in reply] for name, reply in zip(SORTED_SETS, replies, strict=False)
    }
    maps = {name: _texts(reply) for name, reply in zip(HASHES, replies[len(SORTED_SETS) :], strict=False)}
    num_compositions, num_stale, tables, selector, found = replies[-5:]
    names = {key.decode().partition("}:")[2] for key in found}
    group_ids = sorted(name.removeprefix("group:") for name in names if name.startswith("group:"))
    frames = link.client.mget([keys.group(group_id) for group_id in group_ids]) if group_ids else []
    names -= {name for name in names if on_their_way and name.startswith("incoming:")}
    assert names <= {*INDEX, *(f"group:{group_id}" for group_id in group_ids)}, "something is on its way for ever"
    _check_leases(sets, maps)
    meta = maps["meta"]
    return {
        "queued": {p.value: _ids(sets[f"queue_{p.value}"], reverse=p is Purpose.REEVALUATE) for p in Purpose},
        "leased": {key: worker.decode() for key, worker in maps["holders"].items()},
        "attempts": _numbers(maps["attempts"]),
        "done": set(dict(sets["done"])),
        "settled_at": {i: step for i, step in sets["done"] if step != math.inf},
        "planned": dict(sets["planned"]),
        "requests": set(maps["requests"]),
        "fresh": _ids(sets["fresh"]),
        "reevaluated": _ids(sets["reevaluated"]),
        "evaluated": _evaluated(sets["evaluated"], maps["evaluations"]),
        "rounds": {int(step): int(left) for step, left in maps["rounds"].items()},
        "records": set(maps["records"]),
        "refs": {key: number % (1 << 20) for key, number in _numbers(maps["refs"]).items()},
        "frames": dict(zip(group_ids, frames, strict=True)),
        "bytes": int(meta.get("bytes", 0)),
        "fresh_bytes": int(meta.get("fresh_bytes", 0)),
        "tables": unpack_tables(tables or b""),
        "bad_prompts": {key: unpack_prompt(blob) for key, blob in maps["bad_prompts"].items()},
        "batches": {int(step) for step in maps["batches"]},
        "num_compositions": num_compositions,
        "num_stale": num_stale,
        "counters": _numbers(maps["counters"]),
        "success_counts": {int(step): data for step, data in maps["success_counts"].items()},
        "selector": SelectorState(
            round=int(meta.get("selector_round", 0)), through=int(meta.get("selector_through", 0)), data=selector or b""
        ),
        "heard": set(dict(sets["heard"])),
        "claims": {
            worker: (nonce, [i for i in ids if maps["holders"].get(i, b"").decode() == worker])
            for worker, (nonce, *ids) in ((w, text.decode().split(" ")) for w, text in maps["claims"].items())
        },
        "numbers": {name: int(meta.get(name, 0)) for name in NUMBERS},
        "last_failure": meta.get("last_failure", b"").decode(),
    }


def _check_leases(sets: Mapping[str, list[tuple[str, float]]], maps: Mapping[str, dict[str, bytes]]) -> None:
    leased = [key for p in Purpose for key, _ in sets[f"leases_{p.value}"]]
    queued = [key for p in Purpose for key, _ in sets[f"queue_{p.value}"]]
    assert sorted([*leased, *queued]) == sorted(maps["live"]), "open requests are in one queue or leased, never both"
    assert set(leased) == set(maps["holders"])
    holders = [worker.decode() for worker in maps["holders"].values()]
    assert {worker: holders.count(worker) for worker in holders} == _numbers(maps["held"])


def _evaluated(members: list[tuple[str, float]], counts: Mapping[str, bytes]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {label: [] for label in counts}
    for member, _ in members:
        label, _, request_id = member.partition(" ")
        found[label].append(request_id)
    assert {label: len(ids) for label, ids in found.items()} == _numbers(counts)
    return found


def _ids(members: list[tuple[str, float]], *, reverse: bool = False) -> list[str]:
    ids = [key for key, _ in members]
    return ids[::-1] if reverse else ids


def _texts(found: Mapping[bytes, bytes]) -> dict[str, bytes]:
    return {key.decode(): value for key, value in found.items()}


def _numbers(found: Mapping[str, bytes]) -> dict[str, int]:
    return {key: int(value) for key, value in found.items()}
