"""Whether everything that a buffer holds fits together: its facts, read at one moment, and the invariants over them.

    Store.audit() -> Audit --violations--> one line per broken invariant; none in a sound buffer

Reads the index and the sizes of frames, never their content. Pure apart from that: a fact that is changed by hand in a
test breaks exactly the invariant that it belongs to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from bapo.algorithms.settings import AlgorithmConfig
from bapo.core.types import Purpose
from buffer_service.state import BatchRecord, GroupRecord, Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFacts:
    """What is known of an open request."""

    purpose: Purpose
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The facts of one run. Ids of requests and of the groups that answer them are the same."""

    assembled: int
    committed: int
    checkpointed: int
    num_bytes: int
    """What the store counts."""
    fresh_bytes: int
    """The same, of the fresh groups."""
    tables: Tables
    bad_prompts: frozenset[str]
    """Ids of the prompts that are kept for B_bad."""
    batches: Mapping[int, BatchRecord]
    records: Mapping[str, GroupRecord]
    references: Mapping[str, int]
    frame_sizes: Mapping[str, int]
    """Group id -> bytes of its frame, of every frame that there is."""
    fresh: tuple[str, ...]
    reevaluated: tuple[str, ...]
    stale: frozenset[str]
    """Groups that were too old, dropped since the last assembly; some may be held for their texts."""
    evaluated: Mapping[str, tuple[str, ...]]
    """Label -> settled requests; one that was dropped has no group."""
    evaluations: Mapping[str, int]
    """Label -> how many of them the store counts."""
    opened: Mapping[str, OpenFacts]
    queued: Mapping[str, Purpose]
    """Request id -> the queue that it is in."""
    leased: Mapping[str, Purpose]
    holders: Mapping[str, str]
    """Leased request id -> worker."""
    held: Mapping[str, int]
    """Worker -> leases that the store counts."""
    contents: frozenset[str]
    """Ids of the requests whose prompt is stored."""
    done: frozenset[str]
    planned: Mapping[str, int]
    """Open fresh request id -> step."""
    rounds: Mapping[int, int]
    """Step whose re-evaluation round was issued -> its open re-evaluations, as the store counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """One violation."""

    invariant: str
    """A name of INVARIANTS."""
    detail: str


Check = Callable[[Audit, AlgorithmConfig], Iterator[str]]


def violations(audit: Audit, settings: AlgorithmConfig) -> list[Broken]:
    """All that does not fit together, invariant by invariant."""
    found = ((name, detail) for name, check in INVARIANTS.items() for detail in check(audit, settings))
    return [Broken(invariant=name, detail=detail) for name, detail in found]


def _frames(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """Every group that is referred to has its record and its whole frame."""
    for group_id in audit.references:
        record, size = audit.records.get(group_id), audit.frame_sizes.get(group_id)
        if record is None:
            yield f"group {group_id} has no record"
        if size is None:
            yield f"group {group_id} has no frame"
        elif record is not None and size != record.num_bytes:
            yield f"the frame of group {group_id} has {size} bytes, not {record.num_bytes}"


def _references(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """A group is counted once for each table and each retained batch that it is in."""
    wanted = Counter([*audit.fresh, *audit.reevaluated, *(stat.group_id for stat in audit.tables.high)])
    for batch in audit.batches.values():
        wanted.update(batch.held)
    for settled in audit.evaluated.values():
        wanted.update(group_id for group_id in settled if group_id in audit.references)
    # After a restore a prompt may be re-sampled under the id of a group that was too old: that is another group.
    asked_again = {*audit.fresh, *audit.reevaluated, *chain.from_iterable(audit.evaluated.values())}
    wanted.update((audit.stale - asked_again) & audit.references.keys())
    for group_id in sorted(wanted.keys() | audit.references.keys()):
        if wanted[group_id] != audit.references.get(group_id, 0):
            counted = audit.references.get(group_id, 0)
            yield f"group {group_id} is in {wanted[group_id]} tables and batches, but {counted} are counted"


def _orphans(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """No frame and no record is kept of a group that nothing refers to."""
    for what, kept in (("frame", audit.frame_sizes), ("record", audit.records)):
        for group_id in sorted(kept.keys() - audit.references.keys()):
            yield f"nothing refers to group {group_id}, but its {what} is kept"


def _bytes(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """The counts of bytes are the sums of the frames' sizes: of all groups, and of the fresh ones."""
    counts = (("frames", audit.references, audit.num_bytes), ("fresh frames", audit.fresh, audit.fresh_bytes))
    for what, group_ids, counted in counts:
        total = sum(audit.frame_sizes.get(group_id, 0) for group_id in group_ids)
        if total != counted:
            yield f"the {what} have {total} bytes, but {counted} are counted"


def _requests(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """An open request is in exactly one of its purpose's queue and leases, has its content, and is not done."""
    for request_id, facts in audit.opened.items():
        places = [place.get(request_id) for place in (audit.queued, audit.leased)]
        if sorted(filter(None, places)) != [facts.purpose]:
            yield f"request {request_id} is open, but in queue {places[0]} and leases {places[1]}"
        if request_id in audit.done:
            yield f"request {request_id} is open, and done"
        if request_id not in audit.contents:
            yield f"request {request_id} is open, but its content is gone"
    for request_id in sorted((audit.queued.keys() | audit.leased.keys()) - audit.opened.keys()):
        yield f"request {request_id} is queued or leased, but not open"
    for request_id in sorted(audit.contents - audit.opened.keys() - set(audit.fresh)):
        yield f"request {request_id} is neither open nor of a fresh group, but its content is kept"


def _fresh(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """A fresh group has its request, which is done; open fresh requests are planned for their steps, and no others."""
    for group_id in audit.fresh:
        if group_id not in audit.contents:
            yield f"fresh group {group_id} has lost its request"
        if group_id in audit.opened:
            yield f"fresh group {group_id} answers a request that is still open"
    wanted = {key: facts.step for key, facts in audit.opened.items() if facts.purpose is Purpose.FRESH}
    for request_id in sorted(wanted.keys() | audit.planned.keys()):
        if wanted.get(request_id) != audit.planned.get(request_id):
            steps = wanted.get(request_id), audit.planned.get(request_id)
            yield f"request {request_id} is open for step {steps[0]}, but planned for step {steps[1]}"


def _leases(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """A lease has one holder, and each worker's leases are counted."""
    for request_id in sorted(audit.leased.keys() ^ audit.holders.keys()):
        state = "leased, but held by no worker" if request_id in audit.leased else "held, but not leased"
        yield f"request {request_id} is {state}"
    wanted = Counter(audit.holders.values())
    for worker in sorted(wanted.keys() | audit.held.keys()):
        if wanted[worker] != audit.held.get(worker, 0):
            yield f"worker {worker} holds {wanted[worker]} requests, but {audit.held.get(worker, 0)} are counted"


def _bad(audit: Audit, settings: AlgorithmConfig) -> Iterator[str]:
    """B_bad is within its capacity, has no prompt twice, and has the text of each prompt and of no other."""
    entries = audit.tables.bad
    if len(entries) > settings.capacity:
        yield f"B_bad has {len(entries)} prompts, more than its capacity of {settings.capacity}"
    yield from (f"prompt {prompt_id} is in B_bad twice" for prompt_id in _twice([e.prompt_id for e in entries]))
    known = {entry.prompt_id for entry in entries}
    yield from (f"prompt {prompt_id} of B_bad has lost its text" for prompt_id in sorted(known - audit.bad_prompts))
    yield from (f"prompt {prompt_id} is kept, but not in B_bad" for prompt_id in sorted(audit.bad_prompts - known))
    for entry in entries:
        if not 1 <= entry.birth <= audit.tables.step:
            yield f"prompt {entry.prompt_id} of B_bad was born in step {entry.birth}, after {audit.tables.step}"


def _high(audit: Audit, settings: AlgorithmConfig) -> Iterator[str]:
    """B_high holds no group twice; that of `bapo` groups of the latest S steps only, and no prompt twice."""
    entries, last = audit.tables.high, audit.tables.step
    yield from (f"group {group_id} is in B_high twice" for group_id in _twice([e.group_id for e in entries]))
    if settings.name != "bapo":  # other composers keep what they like
        return
    yield from (f"prompt {prompt_id} is in B_high twice" for prompt_id in _twice([e.prompt_id for e in entries]))
    for entry in entries:
        if not last - settings.high_window < entry.birth <= last:
            window = f"the {settings.high_window} steps up to {last}"
            yield f"group {entry.group_id} of B_high was born in step {entry.birth}, outside {window}"


def _progress(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """Checkpointed <= committed <= assembled, and the tables are those after the newest assembly."""
    if not 0 <= audit.checkpointed <= audit.committed <= audit.assembled:
        yield f"checkpointed {audit.checkpointed}, committed {audit.committed}, assembled {audit.assembled}"
    if audit.tables.step != audit.assembled:
        yield f"the tables are those of step {audit.tables.step}, but step {audit.assembled} is assembled"


def _batches(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """Exactly the batches after the newest checkpoint are retained, each with its groups' bytes as its length."""
    wanted = set(range(audit.checkpointed + 1, audit.assembled + 1))
    yield from (f"batch {step} is gone before its checkpoint" for step in sorted(wanted - audit.batches.keys()))
    yield from (f"batch {step} is retained after its checkpoint" for step in sorted(audit.batches.keys() - wanted))
    for step, batch in audit.batches.items():
        records = [audit.records.get(group_id) for group_id in batch.group_ids]
        num_bytes = sum(record.num_bytes for record in records if record is not None)
        if num_bytes != batch.num_bytes:
            yield f"the groups of batch {step} have {num_bytes} bytes, but it says {batch.num_bytes}"
        yield from (f"group {group_id} is in batch {step} twice" for group_id in _twice(batch.group_ids))


def _rounds(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """A round counts the open re-evaluations of its step, until a checkpoint after it: no batch waits for it then."""
    wanted = Counter(facts.step for facts in audit.opened.values() if facts.purpose is Purpose.REEVALUATE)
    for step, left in audit.rounds.items():
        if step >= audit.checkpointed and left != wanted[step]:
            yield f"round {step} has {wanted[step]} open requests, but {left} are counted"


def _evaluations(audit: Audit, _: AlgorithmConfig) -> Iterator[str]:
    """An evaluation counts its settled requests."""
    for label in sorted(audit.evaluated.keys() | audit.evaluations.keys()):
        settled, counted = len(audit.evaluated.get(label, ())), audit.evaluations.get(label, 0)
        if settled != counted:
            yield f"evaluation {label} has {settled} settled requests, but {counted} are counted"


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
"""Name -> check. A check's docstring is what it promises."""


def _twice(ids: Sequence[str]) -> list[str]:
    return sorted(key for key, number in Counter(ids).items() if number > 1)
