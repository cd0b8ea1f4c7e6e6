"""The tables of the memory store, and images of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from bapo.types import Fate, Progress, Prompt, Purpose, RolloutRequest
from buffer_service.groups import FreshGroup, GroupRecord, Incoming, PushFate, Replacement
from buffer_service.image import Image
from buffer_service.store import FORGOTTEN_AT_ONCE, SILENT_WORKER_S
from buffer_service.values import BatchRecord, SelectorState, Tables, left_high, left_prompts


@dataclass(slots=True)
class OpenRequest:
    """A request that is queued, or leased when it has a holder."""

    request: RolloutRequest
    place: int
    """Smaller is handed out earlier, among requests of the same purpose and version."""
    holder: str = ""
    deadline: float = 0.0

    @property
    def order(self) -> tuple[int, int]:
        """Claim order within a purpose: the newest round first for re-evaluations, the oldest version for the rest."""
        version = self.request.min_version
        return (-version if self.request.purpose is Purpose.REEVALUATE else version, self.place)


@dataclass(slots=True)
class MemoryState:
    """Everything of one run. Dicts and lists are in the order of arrival."""

    in_step_order: bool = False
    seq: int = 0
    open: dict[str, OpenRequest] = field(default_factory=dict)
    done: dict[str, float] = field(default_factory=dict)
    """Settled request -> step that was assembled then; inf for those of evaluations, which `forget` ends."""
    frames: dict[str, bytes] = field(default_factory=dict)
    incoming: dict[str, bytes] = field(default_factory=dict)
    bad_frames: set[str] = field(default_factory=set)
    records: dict[str, GroupRecord] = field(default_factory=dict)
    refs: Counter[str] = field(default_factory=Counter)
    fresh: dict[str, RolloutRequest] = field(default_factory=dict)
    reevaluated: list[str] = field(default_factory=list)
    evaluated: dict[str, list[str]] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)
    tables: Tables = field(default_factory=Tables)
    bad_prompts: dict[str, Prompt] = field(default_factory=dict)
    batches: dict[int, BatchRecord] = field(default_factory=dict)
    compositions: list[Mapping[str, Any]] = field(default_factory=list)
    """Newest first."""
    stale: list[Fate] = field(default_factory=list)
    """Newest first."""
    counters: Counter[str] = field(default_factory=Counter)
    heard: dict[str, float] = field(default_factory=dict)
    claims: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """Worker -> nonce of its newest claim that leased something, and what that leased."""
    progress: Progress = field(default_factory=lambda: Progress(step=0, policy_version=0))
    committed: int = 0
    checkpointed: int = 0
    cursor: int = 0
    fresh_dropped: int = 0
    fresh_spares: int = 0
    outcomes: dict[int, bytes] = field(default_factory=dict)
    selector: SelectorState = field(default_factory=SelectorState)
    failures_in_a_row: int = 0
    last_failure: str = ""

    def fresh_in_order(self) -> list[tuple[str, RolloutRequest]]:
        """(group id, request) in the order in which batches consume them."""
        groups = list(self.fresh.items())
        return sorted(groups, key=lambda item: item[1].step) if self.in_step_order else groups

    @property
    def fresh_bytes(self) -> int:
        """Of the frames of the fresh groups."""
        return sum(self.records[group_id].num_bytes for group_id in self.fresh)

    def num_open(self, step: int) -> int:
        """Fresh requests planned for this step or before that are neither done nor dropped."""
        requests = (item.request for item in self.open.values())
        return sum(request.purpose is Purpose.FRESH and request.step <= step for request in requests)

    def num_again(self, step: int) -> int:
        """Re-evaluations of this step that are neither done nor dropped."""
        requests = (item.request for item in self.open.values())
        return sum(request.purpose is Purpose.REEVALUATE and request.step == step for request in requests)

    def raise_cursor(self, cursor: int, spares: int | None) -> bool:
        """Whether it was higher than the one before."""
        if cursor <= self.cursor:
            return False
        self.cursor = cursor
        self.fresh_spares = self.fresh_spares if spares is None else spares
        return True

    def outcomes_behind(self, step: int, limit: int) -> list[bytes]:
        """Of the next steps, at most `limit`, up to the first that has none."""
        steps = takewhile(self.outcomes.__contains__, range(step + 1, step + 1 + limit))
        return [self.outcomes[later] for later in steps]

    def keep_selector(self, state: SelectorState) -> bool:
        """Whether its round was higher than that of the one before."""
        if state.round <= self.selector.round:
            return False
        self.selector = state
        self.outcomes = {step: kept for step, kept in self.outcomes.items() if step > state.through}
        return True

    def add(self, request: RolloutRequest, *, at_head: bool = False) -> bool:
        """Queue a request that was never asked for, or is forgotten and its group gone."""
        if any(request.request_id in taken for taken in (self.open, self.done, self.refs)):
            return False
        self.seq += 1
        self.open[request.request_id] = OpenRequest(request=request, place=-self.seq if at_head else self.seq)
        return True

    def ask(self, request: RolloutRequest) -> bool:
        """`add`, and count it in the round of its step where that was issued."""
        is_new = self.add(request)
        if is_new and request.purpose is Purpose.REEVALUATE and request.step in self.rounds:
            self.rounds[request.step] += 1
        return is_new

    def claimable(self, purposes: Iterable[Purpose], policy_version: int) -> list[OpenRequest]:
        """What weights of this version may answer, in claim order."""
        queued = [o for o in self.open.values() if not o.holder and o.request.min_version <= policy_version]
        return [o for p in purposes for o in sorted(queued, key=lambda o: o.order) if o.request.purpose is p]

    def leased_before(self, worker_id: str, nonce: str) -> list[OpenRequest] | None:
        """What the worker still holds of a claim's first time; [] of an older claim; None for a new one."""
        newest, ids = self.claims.get(worker_id, ("", ()))
        if not nonce or not newest:
            return None
        if nonce == newest:
            return [self.open[i] for i in ids if i in self.open and self.open[i].holder == worker_id]
        return [] if _is_older(nonce, newest) else None

    def remember_claim(self, worker_id: str, nonce: str, claimed: Sequence[OpenRequest]) -> None:
        """So that the claim is known when it comes again; one without a nonce is not, nor is the one before it."""
        self.claims.pop(worker_id, None)
        if nonce:
            self.claims[worker_id] = (nonce, tuple(item.request.request_id for item in claimed))

    def hear(self, worker_id: str, now: float) -> None:
        """A worker shows that it lives; for each that does, a few are forgotten that held nothing and were silent."""
        self.heard[worker_id] = now
        holders = {item.holder for item in self.open.values()}
        silent = sorted((at, worker) for worker, at in self.heard.items() if now - at >= SILENT_WORKER_S)
        for _, worker in silent[:FORGOTTEN_AT_ONCE]:
            if worker not in holders:
                del self.heard[worker]
                self.claims.pop(worker, None)

    def return_expired(self, now: float, max_attempts: int) -> None:
        """Leases that are over count as failed attempts."""
        for item in [item for item in self.open.values() if item.holder and item.deadline <= now]:
            self.attempt_failed(item, "lease_over", max_attempts)

    def attempt_failed(self, item: OpenRequest, reason: str, max_attempts: int) -> str:
        """Queue the request again, in its old place, or drop it after its last attempt."""
        item.holder = ""
        item.request = replace(item.request, attempts=item.request.attempts + 1)
        if item.request.attempts < max_attempts:
            return "requeued"
        self.drop_open(item, reason)
        return "dropped"

    def drop_open(self, item: OpenRequest, reason: str) -> None:
        """Settle a request without a group; the scheduler is told to ask for another fresh one."""
        self.settle(item)
        self.counters[f"dropped_requests:{reason}"] += 1
        self.fresh_dropped += item.request.purpose is Purpose.FRESH

    def settle(self, item: OpenRequest) -> None:
        """The request is done or dropped."""
        request = item.request
        del self.open[request.request_id]
        self.done[request.request_id] = math.inf if request.purpose is Purpose.EVALUATE else self.tables.step
        if request.purpose is Purpose.REEVALUATE and request.step in self.rounds:
            self.rounds[request.step] -= 1
        elif request.purpose is Purpose.EVALUATE:
            self.evaluated.setdefault(request.label, []).append(request.request_id)

    def admit(self, group: Incoming) -> str:
        """Store a group that answers an open request with fresh enough weights; returns a word of `PushFate`."""
        record = group.record
        item = self.open.get(record.group_id)
        if item is None:
            return PushFate.DUPLICATE if record.group_id in self.done else PushFate.UNKNOWN
        if record.policy_version < item.request.min_version:
            item.holder = ""
            return PushFate.STALE
        self.frames[record.group_id] = self.incoming.pop(group.frame_name)
        self.records[record.group_id] = record
        self.refs[record.group_id] = 1
        self.failures_in_a_row = 0
        self.settle(item)
        if record.purpose is Purpose.FRESH:
            self.fresh[record.group_id] = replace(item.request, attempts=0)
        elif record.purpose is Purpose.REEVALUATE:
            self.reevaluated.append(record.group_id)
        return PushFate.STORED

    def replace_stale(self, replacements: Sequence[Replacement], *, hold: bool) -> list[str]:
        """Drop fresh groups and queue the replacing requests at the head, the first of them last; not those groups,
        which are returned, whose replacing request has an id that is taken."""
        taken, dropped = [], []
        for item in reversed(replacements):
            group_id = item.fate.group_id
            if group_id not in self.fresh:
                continue
            if not self.add(item.request, at_head=True):
                taken.append(group_id)
                continue
            del self.fresh[group_id]
            dropped.append(group_id)
            self.stale.insert(0, item.fate)
            self.counters[item.event] += 1
        for group_id in [] if hold else dropped:
            self.refer(group_id, -1)
        return taken

    def forget(self, label: str) -> None:
        """Delete one evaluation."""
        mine = (Purpose.EVALUATE, label)
        self.open = {key: o for key, o in self.open.items() if (o.request.purpose, o.request.label) != mine}
        for request_id in self.evaluated.pop(label, []):
            del self.done[request_id]
            if request_id in self.refs:
                self.refer(request_id, -1)

    def drop_group(self, group_id: str) -> str:
        """The table that the group was in, or ''."""
        record = self.records.get(group_id)
        if self.fresh.pop(group_id, None) is not None:
            table = "fresh"
            self.fresh_dropped += 1
        elif group_id in self.reevaluated:
            table = "reevaluated"
            self.reevaluated.remove(group_id)
        elif record is not None and group_id in self.evaluated.get(record.label, ()):
            table = "evaluated"
        else:
            return ""
        self.refer(group_id, -1)
        self.counters["dropped_groups:by_hand"] += 1
        return table

    def drop_request(self, request_id: str) -> bool:
        """Whether it was open."""
        item = self.open.get(request_id)
        if item is not None:
            self.drop_open(item, "by_hand")
        return item is not None

    def edit_tables(self, before: Tables, after: Tables) -> bool:
        """Whether `before` was the newest."""
        if self.tables != before:
            return False
        for group_id in left_high(before, after):
            self.refer(group_id, -1)
        for prompt_id in left_prompts(before, after):
            del self.bad_prompts[prompt_id]
        self.tables = replace(after, edits=before.edits + 1)
        return True

    def refer(self, group_id: str, change: int) -> None:
        """Change how often a group is referred to; delete it when nothing refers to it any more."""
        self.refs[group_id] += change
        if self.refs[group_id] <= 0:
            del self.refs[group_id], self.records[group_id], self.frames[group_id]


def _is_older(nonce: str, than: str) -> bool:
    """Whether the same client made both, and this one first."""
    (client, number), (other, newer) = nonce.split("-"), than.split("-")
    return client == other and int(number) < int(newer)


def image_of(state: MemoryState) -> Image:
    """One consistent image."""
    opened = sorted(state.open.values(), key=lambda item: item.order)
    purposes = (Purpose.REEVALUATE, Purpose.FRESH)
    image = Image(
        progress=state.progress,
        committed=state.committed,
        checkpointed=state.checkpointed,
        cursor=state.cursor,
        fresh_dropped=state.fresh_dropped,
        fresh_spares=state.fresh_spares,
        tables=state.tables,
        open_requests=tuple(i.request for purpose in purposes for i in opened if i.request.purpose is purpose),
        fresh=tuple(FreshGroup(record=state.records[i], request=request) for i, request in state.fresh_in_order()),
        reevaluated=tuple(state.records[group_id] for group_id in state.reevaluated),
        records={},
        bad_prompts=dict(state.bad_prompts),
        batches=tuple(state.batches[step] for step in sorted(state.batches)),
        compositions=tuple(reversed(state.compositions)),
        rounds=dict(state.rounds),
        stale=tuple(reversed(state.stale)),
        counters=dict(state.counters),
        outcomes=dict(state.outcomes),
        selector=state.selector,
    )
    own = image.all_records
    return replace(image, records={i: state.records[i] for i in image.references if i not in own})


def state_of(image: Image, frames: Iterable[tuple[str, bytes | memoryview]], *, in_step_order: bool) -> MemoryState:
    """The state that an image describes."""
    state = MemoryState(
        in_step_order=in_step_order,
        frames={group_id: bytes(frame) for group_id, frame in frames},
        records=image.all_records,
        refs=image.references,
        fresh={group.record.group_id: group.request for group in image.fresh},
        reevaluated=[record.group_id for record in image.reevaluated],
        rounds=dict(image.rounds),
        tables=image.tables,
        bad_prompts=dict(image.bad_prompts),
        batches={batch.step: batch for batch in image.batches},
        compositions=list(reversed(image.compositions)),
        stale=list(reversed(image.stale)),
        counters=Counter(image.counters),
        progress=image.progress,
        committed=image.committed,
        checkpointed=image.checkpointed,
        cursor=image.cursor,
        fresh_dropped=image.fresh_dropped,
        fresh_spares=image.fresh_spares,
        outcomes=dict(image.outcomes),
        selector=image.selector,
    )
    state.done = dict.fromkeys(state.records, image.tables.step)
    for request in image.open_requests:
        state.add(request)
    return state
