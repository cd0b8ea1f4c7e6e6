"""Consistency check of a buffer: its facts from one consistent reading, and the invariants over them.

    Store.audit() -> Audit --violations--> one line per violation; none if the buffer is consistent

Reads the index and the sizes of frames, never their content. Otherwise pure: a test that changes one fact violates
exactly the invariant of that fact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from bapo.algorithms.composers.registry import load_composer
from bapo.algorithms.settings import AlgorithmConfig
from bapo.core.types import Purpose
from buffer_service.state import BatchRecord, GroupRecord, Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFacts:
    """Facts of an open request."""

    purpose: Purpose
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The facts of one run. A request and its group have the same id."""

    assembled: int
    committed: int
    checkpointed: int
    num_bytes: int
    """Byte counter of the store."""
    fresh_bytes: int
    """Byte counter of the fresh groups."""
    tables: Tables
    bad_prompts: frozenset[str]
    """Ids of the prompts stored for B_bad."""
    batches: Mapping[int, BatchRecord]
    records: Mapping[str, GroupRecord]
    references: Mapping[str, int]
    frame_sizes: Mapping[str, int]
    """Group id -> bytes of its frame, for every stored frame."""
    fresh: tuple[str, ...]
    reevaluated: tuple[str, ...]
    stale: frozenset[str]
    """Groups dropped as stale since the last assembly; some may be retained for their texts."""
    evaluated: Mapping[str, tuple[str, ...]]
    """Label -> finished requests; a dropped one has no group."""
    evaluations: Mapping[str, int]
    """Label -> counter of finished requests."""
    opened: Mapping[str, OpenFacts]
    queued: Mapping[str, Purpose]
    """Request id -> its queue."""
    leased: Mapping[str, Purpose]
    holders: Mapping[str, str]
    """Leased request id -> worker."""
    held: Mapping[str, int]
    """Worker -> counter of its leases."""
    contents: frozenset[str]
    """Ids of the requests whose content is stored."""
    done: frozenset[str]
    planned: Mapping[str, int]
    """Open fresh request id -> step."""
    rounds: Mapping[int, int]
    """Step whose re-evaluation round was issued -> counter of its open re-evaluations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """One violation."""

    invariant: str
    """Key of INVARIANTS."""
    detail: str


Check = Callable[[Audit, AlgorithmConfig], Iterator[str]]


def violations(audit: Audit, settings: AlgorithmConfig) -> list[Broken]:
    """All violations, by invariant."""
    found = ((name, detail) for name, check in INVARIANTS.items() for detail in check(audit, settings))
    return [Broken(invariant=name, detail=detail) for name, detail in found]


def _frames(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """Every referenced group has its record and its complete frame."""
    for group_id in audit.references:
        record, size = audit.records.get(group_id), audit.frame_sizes.get(group_id)
        if record is None:
            yield f"group {group_id} has no record"
        if size is None:
            yield f"group {group_id} has no frame"
        elif record is not None and size != record.num_bytes:
            yield f"the frame of group {group_id} has {size} bytes, not {record.num_bytes}"


def _references(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """The reference count of a group equals the number of tables and retained batches that contain it."""
    wanted = Counter([*audit.fresh, *audit.reevaluated, *(stat.group_id for stat in audit.tables.high)])
    for batch in audit.batches.values():
        wanted.update(batch.held)
    for settled in audit.evaluated.values():
        wanted.update(group_id for group_id in settled if group_id in audit.references)
    # After a restore a prompt may be re-sampled under the id of a stale group: that is a different group.
    asked_again = {*audit.fresh, *audit.reevaluated, *chain.from_iterable(audit.evaluated.values())}
    wanted.update((audit.stale - asked_again) & audit.references.keys())
    for group_id in sorted(wanted.keys() | audit.references.keys()):
        if wanted[group_id] != audit.references.get(group_id, 0):
            counted = audit.references.get(group_id, 0)
            yield f"group {group_id} is in {wanted[group_id]} tables and batches, but its reference count is {counted}"


def _orphans(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """No frame or record is stored for an unreferenced group."""
    for what, kept in (("frame", audit.frame_sizes), ("record", audit.records)):
        for group_id in sorted(kept.keys() - audit.references.keys()):
            yield f"group {group_id} is not referenced, but its {what} is stored"


def _bytes(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """The byte counters equal the sums of the frame sizes: of all groups, and of the fresh ones."""
    counts = (("frames", audit.references, audit.num_bytes), ("fresh frames", audit.fresh, audit.fresh_bytes))
    for what, group_ids, counted in counts:
        total = sum(audit.frame_sizes.get(group_id, 0) for group_id in group_ids)
        if total != counted:
            yield f"the {what} have {total} bytes, but the counter is {counted}"


def _requests(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """An open request is either queued or leased under its purpose, has its content, and is not done."""
    for request_id, facts in audit.opened.items():
        places = [place.get(request_id) for place in (audit.queued, audit.leased)]
        if sorted(filter(None, places)) != [facts.purpose]:
            yield f"request {request_id} is open, but in queue {places[0]} and in leases {places[1]}"
        if request_id in audit.done:
            yield f"request {request_id} is both open and done"
        if request_id not in audit.contents:
            yield f"request {request_id} is open, but its content is missing"
    for request_id in sorted((audit.queued.keys() | audit.leased.keys()) - audit.opened.keys()):
        yield f"request {request_id} is queued or leased, but not open"
    for request_id in sorted(audit.contents - audit.opened.keys() - set(audit.fresh)):
        yield f"request {request_id} is neither open nor of a fresh group, but its content is stored"


def _fresh(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """A fresh group has its request, which is done; exactly the open fresh requests are planned for their steps."""
    for group_id in audit.fresh:
        if group_id not in audit.contents:
            yield f"the request of fresh group {group_id} is missing"
        if group_id in audit.opened:
            yield f"the request of fresh group {group_id} is still open"
    wanted = {key: facts.step for key, facts in audit.opened.items() if facts.purpose is Purpose.FRESH}
    for request_id in sorted(wanted.keys() | audit.planned.keys()):
        if wanted.get(request_id) != audit.planned.get(request_id):
            steps = wanted.get(request_id), audit.planned.get(request_id)
            yield f"request {request_id} is open for step {steps[0]}, but planned for step {steps[1]}"


def _leases(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """A lease has one holder, and each worker's lease counter is correct."""
    for request_id in sorted(audit.leased.keys() ^ audit.holders.keys()):
        state = "leased, but held by no worker" if request_id in audit.leased else "held, but not leased"
        yield f"request {request_id} is {state}"
    wanted = Counter(audit.holders.values())
    for worker in sorted(wanted.keys() | audit.held.keys()):
        if wanted[worker] != audit.held.get(worker, 0):
            yield f"worker {worker} holds {wanted[worker]} requests, but its counter is {audit.held.get(worker, 0)}"


def _bad(audit: Audit, settings: AlgorithmConfig) -> Iterator[str]:
    """B_bad is within its capacity, has no duplicates, and exactly the texts of its prompts are stored."""
    entries = audit.tables.bad
    if len(entries) > settings.capacity:
        yield f"B_bad has {len(entries)} prompts, more than its capacity of {settings.capacity}"
    yield from (f"prompt {prompt_id} is in B_bad twice" for prompt_id in _twice([e.prompt_id for e in entries]))
    known = {entry.prompt_id for entry in entries}
    yield from (f"prompt {prompt_id} of B_bad has no text" for prompt_id in sorted(known - audit.bad_prompts))
    yield from (f"prompt {prompt_id} has a text but is not in B_bad" for prompt_id in sorted(audit.bad_prompts - known))
    for entry in entries:
        if not 1 <= entry.birth <= audit.tables.step:
            yield f"prompt {entry.prompt_id} of B_bad was added in step {entry.birth}, after step {audit.tables.step}"


def _high(audit: Audit, settings: AlgorithmConfig) -> Iterator[str]:
    """B_high has no duplicate groups; with a window of S steps, only groups of the latest S, and one per prompt."""
    entries, last = audit.tables.high, audit.tables.step
    yield from (f"group {group_id} is in B_high twice" for group_id in _twice([e.group_id for e in entries]))
    high_window = load_composer(settings).high_window
    if high_window is None:
        return
    yield from (f"prompt {prompt_id} is in B_high twice" for prompt_id in _twice([e.prompt_id for e in entries]))
    for entry in entries:
        if not last - high_window < entry.birth <= last:
            window = f"the {high_window} steps up to {last}"
            yield f"group {entry.group_id} of B_high was added in step {entry.birth}, outside {window}"


def _progress(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """Checkpointed <= committed <= assembled, and the tables are those of the newest assembly."""
    if not 0 <= audit.checkpointed <= audit.committed <= audit.assembled:
        yield f"checkpointed {audit.checkpointed}, committed {audit.committed}, assembled {audit.assembled}"
    if audit.tables.step != audit.assembled:
        yield f"the tables are those of step {audit.tables.step}, but the newest assembly is step {audit.assembled}"


def _batches(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """Exactly the batches after the newest checkpoint are retained, each with the byte count of its groups."""
    wanted = set(range(audit.checkpointed + 1, audit.assembled + 1))
    yield from (f"batch {step} is missing before its checkpoint" for step in sorted(wanted - audit.batches.keys()))
    yield from (f"batch {step} is retained after its checkpoint" for step in sorted(audit.batches.keys() - wanted))
    for step, batch in audit.batches.items():
        records = [audit.records.get(group_id) for group_id in batch.group_ids]
        num_bytes = sum(record.num_bytes for record in records if record is not None)
        if num_bytes != batch.num_bytes:
            yield f"the groups of batch {step} have {num_bytes} bytes, but the batch records {batch.num_bytes}"
        yield from (f"group {group_id} is in batch {step} twice" for group_id in _twice(batch.group_ids))


def _rounds(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """The counter of a round equals the open re-evaluations of its step, until a checkpoint at or after it."""
    wanted = Counter(facts.step for facts in audit.opened.values() if facts.purpose is Purpose.REEVALUATE)
    for step, left in audit.rounds.items():
        if step >= audit.checkpointed and left != wanted[step]:
            yield f"round {step} has {wanted[step]} open requests, but its counter is {left}"


def _evaluations(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """The counter of an evaluation equals its finished requests."""
    for label in sorted(audit.evaluated.keys() | audit.evaluations.keys()):
        settled, counted = len(audit.evaluated.get(label, ())), audit.evaluations.get(label, 0)
        if settled != counted:
            yield f"evaluation {label} has {settled} finished requests, but its counter is {counted}"


INVARIANTS: dict[str, Check] = {
    "frames": _frames,
    "references": _references,
    "orphans": _orphans,
    "bytes": _bytes,
    "requests": _requests,
    "fresh": _fresh,
    "leases": _leases,
    "bad": _bad,
    "high": _high,
    "progress": _progress,
    "batches": _batches,
    "rounds": _rounds,
    "evaluations": _evaluations,
}
"""Name -> check. The docstring of a check describes the invariant."""


def _twice(ids: Sequence[str]) -> list[str]:
    return sorted(key for key, number in Counter(ids).items() if number > 1)
