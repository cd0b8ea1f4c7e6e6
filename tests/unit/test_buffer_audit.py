"""Each invariant of a buffer: a sound one has no violation, and a fact that is changed breaks the one it belongs to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bapo.algorithms.settings import AlgorithmConfig
from bapo.core.codec import pack_group, read_group_header
from bapo.core.types import Purpose
from buffer_service.state import BatchRecord, Tables, record_of
from buffer_service.store.invariants import Audit, OpenFacts, violations
from tests.support.buffer import hard, stat
from tests.support.factories import make_group

SETTINGS = AlgorithmConfig(batch_size=4, bad_capacity=2, high_window=2)


def record(group_id: str, num_bytes: int = 100) -> Any:
    return record_of(read_group_header(pack_group(make_group(group_id=group_id))), num_bytes, "0" * 32)


def batch(step: int, *group_ids: str) -> BatchRecord:
    return BatchRecord(step=step, group_ids=group_ids, header={}, num_bytes=100 * len(group_ids))


SOUND = Audit(
    assembled=5,
    committed=4,
    checkpointed=3,
    num_bytes=800,
    fresh_bytes=200,
    tables=Tables(step=5, bad=(hard("p", birth=4), hard("q", birth=5)), high=(stat("h", birth=4), stat("b", birth=5))),
    bad_prompts=frozenset({"p", "q"}),
    batches={4: replace(batch(4, "b"), untrained=("u",)), 5: batch(5, "b", "h")},
    records={key: record(key) for key in ("f1", "f2", "r", "e", "h", "b", "u", "s")},
    references={"f1": 1, "f2": 1, "r": 1, "e": 1, "h": 2, "b": 3, "u": 1, "s": 1},
    frame_sizes=dict.fromkeys(("f1", "f2", "r", "e", "h", "b", "u", "s"), 100),
    fresh=("f1", "f2"),
    reevaluated=("r",),
    stale=frozenset({"s", "not held"}),
    evaluated={"cd@5": ("e", "dropped")},
    evaluations={"cd@5": 2},
    opened={
        "o1": OpenFacts(purpose=Purpose.FRESH, step=6),
        "o2": OpenFacts(purpose=Purpose.REEVALUATE, step=6),
        "o3": OpenFacts(purpose=Purpose.EVALUATE, step=5),
    },
    queued={"o1": Purpose.FRESH},
    leased={"o2": Purpose.REEVALUATE, "o3": Purpose.EVALUATE},
    holders={"o2": "w", "o3": "w"},
    held={"w": 2},
    contents=frozenset({"o1", "o2", "o3", "f1", "f2"}),
    done=frozenset({"f1", "f2", "r", "e"}),
    planned={"o1": 6},
    rounds={2: 9, 6: 1},
)
"""Two fresh groups, a re-evaluated, an evaluated one, B_high and two retained batches; round 2 is long over. Batch 4
holds u, which it did not train, and s is stale and held."""

TABLES_4 = replace(SOUND.tables, step=4, bad=(hard("p"), hard("q")))
BROKEN: list[tuple[str, str, dict[str, Any]]] = [
    ("frames", "group r has no record", {"records": {k: v for k, v in SOUND.records.items() if k != "r"}}),
    ("frames", "group r has no frame", {"frame_sizes": {k: 100 for k in SOUND.records if k != "r"}, "num_bytes": 700}),
    (
        "frames",
        "the frame of group r has 90 bytes, not 100",
        {"frame_sizes": {**SOUND.frame_sizes, "r": 90}, "num_bytes": 790},
    ),
    ("references", "group h is in 2 tables and batches, but its ref", {"references": {**SOUND.references, "h": 3}}),
    ("references", "group s is in 0 tables and batches, but its ref", {"stale": frozenset()}),
    ("references", "group u is in 0 tables and batches, but", {"batches": {4: batch(4, "b"), 5: batch(5, "b", "h")}}),
    ("orphans", "group x is not referenced, but its frame is stored", {"frame_sizes": SOUND.frame_sizes | {"x": 1}}),
    ("orphans", "group x is not referenced, but its record", {"records": {**SOUND.records, "x": record("x")}}),
    ("bytes", "the frames have 800 bytes, but the counter is 801", {"num_bytes": 801}),
    ("bytes", "the fresh frames have 200 bytes, but the counter is 0", {"fresh_bytes": 0}),
    ("requests", "request o1 is open, but in queue None and in leases None", {"queued": {}}),
    (
        "requests",
        "request o1 is open, but in queue fresh and in leases fresh",
        {"leased": SOUND.leased | {"o1": Purpose.FRESH}, "holders": SOUND.holders | {"o1": "w"}, "held": {"w": 3}},
    ),
    ("requests", "request o1 is open, but in queue evaluate", {"queued": {"o1": Purpose.EVALUATE}}),
    ("requests", "request o1 is both open and done", {"done": SOUND.done | {"o1"}}),
    ("requests", "request o1 is open, but its content is missing", {"contents": SOUND.contents - {"o1"}}),
    ("requests", "request x is queued or leased, but not open", {"queued": SOUND.queued | {"x": Purpose.FRESH}}),
    ("requests", "request x is neither open nor of a fresh group", {"contents": SOUND.contents | {"x"}}),
    ("fresh", "the request of fresh group f1 is missing", {"contents": SOUND.contents - {"f1"}}),
    ("fresh", "request o1 is open for step 6, but planned for step 7", {"planned": {"o1": 7}}),
    ("fresh", "request x is open for step None, but planned for step 6", {"planned": {"o1": 6, "x": 6}}),
    ("leases", "request o2 is leased, but held by no worker", {"holders": {"o3": "w"}, "held": {"w": 1}}),
    ("leases", "request x is held, but not leased", {"holders": SOUND.holders | {"x": "w"}, "held": {"w": 3}}),
    ("leases", "worker w holds 2 requests, but its counter is 1", {"held": {"w": 1}}),
    ("bad", "prompt p is in B_bad twice", {"tables": replace(SOUND.tables, bad=(hard("p"), hard("p"))),
                                           "bad_prompts": frozenset({"p"})}),
    ("bad", "B_bad has 3 prompts, more than its capacity of 2",
     {"tables": replace(SOUND.tables, bad=(hard("p"), hard("q"), hard("r"))),
      "bad_prompts": frozenset({"p", "q", "r"})}),
    ("bad", "prompt q of B_bad has no text", {"bad_prompts": frozenset({"p"})}),
    ("bad", "prompt x has a text but is not in B_bad", {"bad_prompts": frozenset({"p", "q", "x"})}),
    ("bad", "prompt q of B_bad was added in step 6, after step 5",
     {"tables": replace(SOUND.tables, bad=(hard("p"), hard("q", birth=6)))}),
    ("high", "group h of B_high was added in step 3, outside the 2 steps up to 5",
     {"tables": replace(SOUND.tables, high=(stat("h", birth=3), stat("b", birth=5)))}),
    ("high", "group h of B_high was added in step 6",
     {"tables": replace(SOUND.tables, high=(stat("h", birth=6), stat("b", birth=5)))}),
    ("high", "prompt h is in B_high twice",
     {"tables": replace(SOUND.tables, high=(stat("h", birth=4), stat("b", birth=5, prompt_id="h")))}),
    ("progress", "checkpointed 3, committed 2, assembled 5", {"committed": 2}),
    ("progress", "the tables are those of step 4, but the newest assembly is step 5",
     {"tables": replace(TABLES_4, high=(stat("h", birth=4), stat("b", birth=3)))}),
    ("batches", "batch 3 is retained after its checkpoint", {"batches": {3: batch(3), **SOUND.batches}}),
    ("batches", "the groups of batch 4 have 100 bytes, but the batch records 99",
     {"batches": {**SOUND.batches, 4: replace(SOUND.batches[4], num_bytes=99)}}),
    ("rounds", "round 6 has 1 open requests, but its counter is 0", {"rounds": {6: 0}}),
    ("evaluations", "evaluation cd@5 has 2 finished requests, but its counter is 1", {"evaluations": {"cd@5": 1}}),
]  # fmt: skip


def test_a_sound_buffer_has_no_violation() -> None:
    assert violations(SOUND, SETTINGS) == []


@pytest.mark.parametrize(("invariant", "detail", "change"), BROKEN)
def test_a_fact_that_is_changed_breaks_its_own_invariant(invariant: str, detail: str, change: dict[str, Any]) -> None:
    broken = violations(replace(SOUND, **change), SETTINGS)
    assert broken, "nothing was noticed"
    assert {item.invariant for item in broken} <= {invariant, "batches" if "records" in change else invariant}
    assert any(detail in item.detail for item in broken if item.invariant == invariant), broken


def test_a_batch_that_is_gone_before_its_checkpoint_is_noticed_with_its_references() -> None:
    broken = violations(replace(SOUND, batches={5: SOUND.batches[5]}), SETTINGS)
    assert [(item.invariant, item.detail) for item in broken] == [
        ("references", "group b is in 2 tables and batches, but its reference count is 3"),
        ("references", "group u is in 0 tables and batches, but its reference count is 1"),
        ("batches", "batch 4 is missing before its checkpoint"),
    ]
