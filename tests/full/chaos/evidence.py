"""All that is known of a run when it has ended: ledgers, and what its Redis holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import redis

from bapo.config.tree import Config
from bapo.core.codec import result_from_map, unpack_group
from buffer_service.store.redis.keys import Keys
from buffer_service.store.redis.rows import unpack_batch_record, unpack_result, unpack_tables
from tests.full.chaos.ledger import Line, digest_of_group, result_line


@dataclass(frozen=True)
class Stored:
    """What Redis holds of one run, read key by key."""

    records: set[str] = field(default_factory=set)
    """Ids of the groups that the index knows."""
    refs: Mapping[str, int] = field(default_factory=dict)
    frames: Mapping[str, str] = field(default_factory=dict)
    """Group id -> digest of the group in the frame."""
    batches: Mapping[int, Line] = field(default_factory=dict)
    """Step -> {"groups": ids, "untrained": ids that are held, "results": lines} of the batches that are retained."""
    bad: Sequence[tuple[str, int]] = ()
    high: Sequence[tuple[str, int]] = ()
    assembled: int = 0
    open: set[str] = field(default_factory=set)
    """Requests that are neither settled nor dropped."""
    queued: Sequence[str] = ()
    leased: Mapping[str, int] = field(default_factory=dict)
    """Request id -> deadline in ms of Redis' clock."""
    holders: Mapping[str, str] = field(default_factory=dict)
    read_at_s: float = 0.0
    """Unix time of Redis when it was read."""
    done: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)
    """Groups that were dropped as too old since the newest batch."""
    fresh: set[str] = field(default_factory=set)
    """Groups, re-evaluated ones too, that no batch has looked at."""
    evaluated: set[tuple[str, str]] = field(default_factory=set)
    """(label, id) of the settled requests of evaluations; one that was dropped has no group."""
    evaluations: Mapping[str, int] = field(default_factory=dict)
    """Label -> how many of them the store counts."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Event -> how often the store says that it happened; only what it says against itself is believed."""


@dataclass(frozen=True)
class Evidence:
    """Ledgers and store of one run."""

    config: Config
    lines: Sequence[Line]
    stored: Stored

    def of(self, event: str) -> list[Line]:
        """The lines of one kind of event."""
        return [line for line in self.lines if line["event"] == event]

    @cached_property
    def sent(self) -> dict[str, list[Line]]:
        """Group id -> every content that a producer has sent under it."""
        found: defaultdict[str, list[Line]] = defaultdict(list)
        for line in self.of("sent"):
            for group in line["groups"]:
                found[group["id"]].append(group)
        return found

    @cached_property
    def acknowledged(self) -> set[str]:
        """Groups that the service said it has."""
        results = [pair for line in self.of("acknowledged") for pair in line["results"].items()]
        return {group_id for group_id, result in results if result in ("stored", "duplicate")}

    @cached_property
    def batches(self) -> dict[int, Line]:
        """Step -> the batch as the learner got it first."""
        found: dict[int, Line] = {}
        for line in self.of("batch"):
            found.setdefault(line["step"], line)
        return dict(sorted(found.items()))

    @cached_property
    def looked_at(self) -> dict[str, int]:
        """Group id -> the step whose assembly consumed it, of batches that the learner got or Redis retains."""
        found: dict[str, int] = {}
        for step, batch in [*self.stored.batches.items(), *self.batches.items()]:
            for result in batch["results"]:
                if result["reason"] != "reused":
                    found[result["id"]] = step
        return found

    @cached_property
    def collected(self) -> set[str]:
        """Groups of evaluations that the evaluator got, and may have had deleted; or that it had deleted unseen,
        because the evaluator that had asked for them was killed and a newer version is measured."""
        got = {group_id for line in self.of("collected") for group_id in line["ids"]}
        abandoned = {line["label"] for line in self.of("forgot")} - {line["label"] for line in self.of("collected")}
        asked = [pair for line in self.of("asking") for pair in line.get("labels", {}).items()]
        return got | {group_id for group_id, label in asked if label in abandoned}


def read_store(url: str, run: str) -> Stored:
    """Read the keys of a run. Nothing of the service, its store or its scripts takes part."""
    keys = Keys(run)
    with redis.Redis.from_url(url) as client:
        meta = client.hgetall(keys["meta"])
        tables = unpack_tables(client.get(keys["tables"]) or b"")
        purposes = ("fresh", "reevaluate", "evaluate")
        leases = [pair for p in purposes for pair in client.zrange(keys[f"leases_{p}"], 0, -1, withscores=True)]
        return Stored(
            records=_texts(client.hkeys(keys["records"])),
            refs={key.decode(): int(number) % (1 << 20) for key, number in client.hgetall(keys["refs"]).items()},
            frames=_frames(client, keys),
            batches={int(step): _batch(blob) for step, blob in client.hgetall(keys["batches"]).items()},
            bad=[(entry.prompt_id, entry.birth) for entry in tables.bad],
            high=[(stat.group_id, stat.birth) for stat in tables.high],
            assembled=int(meta.get(b"assembled", 0)),
            read_at_s=float(client.time()[0]),
            open=_texts(client.hkeys(keys["live"])),
            queued=[member.decode() for p in purposes for member in client.zrange(keys[f"queue_{p}"], 0, -1)],
            leased={member.decode(): int(deadline) for member, deadline in leases},
            holders={key.decode(): value.decode() for key, value in client.hgetall(keys["holders"]).items()},
            done=_texts(client.zrange(keys["done"], 0, -1)),
            stale={unpack_result(blob).group_id for blob in client.lrange(keys["stale"], 0, -1)},
            fresh=_texts([*client.zrange(keys["fresh"], 0, -1), *client.zrange(keys["reevaluated"], 0, -1)]),
            evaluated={
                (a, b) for a, _, b in (m.decode().partition(" ") for m in client.zrange(keys["evaluated"], 0, -1))
            },
            evaluations={key.decode(): int(number) for key, number in client.hgetall(keys["evaluations"]).items()},
            counters={key.decode(): int(number) for key, number in client.hgetall(keys["counters"]).items()},
        )


def _texts(values: Any) -> set[str]:
    return {value.decode() for value in values}


def _frames(client: Any, keys: Keys) -> dict[str, str]:
    found = {}
    for key in client.scan_iter(match=keys.group("*"), count=1000):
        found[key.decode().rpartition(":")[2]] = digest_of_group(unpack_group(client.get(key)))
    return found


def _batch(blob: bytes) -> Line:
    record = unpack_batch_record(blob)
    results = [result_line(result_from_map(fields)) for fields in record.header["results"]]
    return {"groups": list(record.group_ids), "untrained": list(record.untrained), "results": results}
