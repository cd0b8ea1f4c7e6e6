"""A small model of what a store holds, written from the docstrings of `RedisStore` alone and free of any speed.

Independent of the store in Redis: it keeps no reference counts (they follow from who names a group), no claim scores
(the order is a sort), no prompts of B_bad (they follow from the table).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from bapo.core.errors import ContractError
from bapo.core.types import GroupResult, Progress, Prompt, Purpose, RolloutRequest
from buffer_service.state import (
    Assembly,
    BatchRecord,
    FreshGroup,
    GroupRecord,
    Incoming,
    Readiness,
    Replacement,
    SelectorState,
    StepReading,
    Tables,
    View,
)
from buffer_service.store.run_image import Image
from tests.support.buffer import Pushed

REMEMBERED_STEPS = 20
SHOWN_SECONDS = 3600


@dataclass
class Asked:
    """One open request."""

    request: RolloutRequest
    attempts: int = 0
    holder: str = ""
    leased_at: float = 0.0
    claimed_by: tuple[str, int] = ("", 0)
    """Nonce of the claim that leased it, and its place in the answer."""


@dataclass
class Model:
    """Everything of one run; `now` is a clock that the test moves."""

    lease_s: float
    max_attempts: int
    in_step_order: bool
    now: float = 0.0
    line: list[Asked] = field(default_factory=list)
    """Open requests; those that were put at the head come first."""
    settled: dict[str, int] = field(default_factory=dict)
    groups: dict[str, Incoming] = field(default_factory=dict)
    """Every group that was ever stored."""
    fresh: list[tuple[str, RolloutRequest]] = field(default_factory=list)
    reevaluated: list[str] = field(default_factory=list)
    evaluations: dict[str, list[str]] = field(default_factory=dict)
    issued: set[int] = field(default_factory=set)
    """Steps whose re-evaluation round was issued."""
    tables: Tables = field(default_factory=Tables)
    prompts: dict[str, Prompt] = field(default_factory=dict)
    batches: dict[int, BatchRecord] = field(default_factory=dict)
    compositions: list[Any] = field(default_factory=list)
    """Oldest first."""
    stale: list[GroupResult] = field(default_factory=list)
    """In the order in which a view shows them."""
    held_stale: list[str] = field(default_factory=list)
    """Stale groups that stay until a batch reports them."""
    counters: Counter[str] = field(default_factory=Counter)
    heard: dict[str, float] = field(default_factory=dict)
    nonces: dict[str, str] = field(default_factory=dict)
    """Of each worker's newest claim that leased something."""
    progress: Progress = field(default_factory=lambda: Progress(step=0, policy_version=0))
    committed: int = 0
    checkpointed: int = 0
    cursor: int = 0
    fresh_dropped: int = 0
    fresh_spares: int = 0
    success_counts_of_steps: dict[int, bytes] = field(default_factory=dict)
    selector: SelectorState = field(default_factory=SelectorState)
    failures: int = 0
    last_failure: str = ""

    # -- what follows from the rest

    def find(self, request_id: str) -> Asked | None:
        return next((asked for asked in self.line if asked.request.request_id == request_id), None)

    def claim_order(self, purpose: Purpose) -> list[Asked]:
        sign = -1 if purpose is Purpose.REEVALUATE else 1
        mine = [asked for asked in self.line if asked.request.purpose is purpose]
        return sorted(mine, key=lambda asked: sign * asked.request.min_version)

    @property
    def refs(self) -> dict[str, int]:
        """Who names each group: a table, an evaluation, B_high, a retained batch."""
        named = [group_id for group_id, _ in self.fresh] + self.reevaluated
        named += [i for ids in self.evaluations.values() for i in ids if i in self.groups]
        named += [stat.group_id for stat in self.tables.high]
        named += [group_id for batch in self.batches.values() for group_id in (*batch.group_ids, *batch.untrained)]
        named += self.held_stale
        return dict(Counter(named))

    @property
    def frames(self) -> dict[str, bytes]:
        return {group_id: bytes(self.groups[group_id].frame) for group_id in self.refs}

    @property
    def records(self) -> dict[str, GroupRecord]:
        return {group_id: self.groups[group_id].record for group_id in self.refs}

    @property
    def fresh_in_order(self) -> list[tuple[str, RolloutRequest]]:
        return sorted(self.fresh, key=lambda item: item[1].step) if self.in_step_order else list(self.fresh)

    @property
    def fresh_bytes(self) -> int:
        return sum(len(self.groups[group_id].frame) for group_id, _ in self.fresh)

    @property
    def rounds(self) -> dict[int, int]:
        """What each issued round waits for: the open re-evaluations of its step."""
        again = Counter(asked.request.step for asked in self.claim_order(Purpose.REEVALUATE))
        return {step: again[step] for step in self.issued}

    @property
    def bad_prompts(self) -> dict[str, Prompt]:
        return {entry.prompt_id: self.prompts[entry.prompt_id] for entry in self.tables.bad}

    # -- requests

    def enqueue(self, requests: Sequence[RolloutRequest], *, cursor: int | None, spares: int | None = None) -> int:
        if cursor is not None and not cursor - len(requests) <= self.cursor < cursor:
            return 0
        if cursor is not None and spares is not None:
            self.fresh_spares = spares
        self.cursor = self.cursor if cursor is None else cursor
        return sum([self._ask(request, len(self.line)) for request in requests])

    def enqueue_round(self, step: int, requests: Sequence[RolloutRequest]) -> int:
        if step in self.issued:
            return 0
        self.issued.add(step)
        return sum([self._ask(request, len(self.line)) for request in requests])

    def _ask(self, request: RolloutRequest, place: int) -> bool:
        if self.find(request.request_id) or request.request_id in (*self.settled, *self.refs):
            return False
        self.prompts[request.prompt.prompt_id] = request.prompt
        self.line.insert(min(place, len(self.line)), Asked(request))
        return True

    def claim(
        self, worker: str, *, limit: int, policy_version: int, with_fresh: bool, nonce: str = ""
    ) -> list[RolloutRequest]:
        self.expire()
        self.hear(worker)
        if nonce and worker in self.nonces and _is_repeated_or_older(nonce, self.nonces[worker]):
            taken = self.held_under(worker, nonce) if nonce == self.nonces[worker] else []
            return self._lease(taken)
        order = [Purpose.REEVALUATE, Purpose.EVALUATE] + ([Purpose.FRESH] if with_fresh else [])
        queued = [asked for purpose in order for asked in self.claim_order(purpose) if not asked.holder]
        taken = [asked for asked in queued if asked.request.min_version <= policy_version][:limit]
        if taken:
            for asked in self.held_under(worker, nonce):
                asked.claimed_by = ("", 0)  # a claim without a nonce came between, so that this is no repetition
            self.nonces[worker] = nonce
        for place, asked in enumerate(taken):
            asked.holder, asked.claimed_by = worker, (nonce, place)
        return self._lease(taken)

    def hear(self, worker: str) -> None:
        """Those that were silent for an hour and hold nothing are forgotten as soon as another one is heard of."""
        self.heard[worker] = self.now
        holders = {asked.holder for asked in self.line}
        for other in [w for w, at in self.heard.items() if self.now - at >= SHOWN_SECONDS and w not in holders]:
            del self.heard[other]
            self.nonces.pop(other, None)

    def held_under(self, worker: str, nonce: str) -> list[Asked]:
        """What the worker holds of one claim, in the order of its answer."""
        held = [asked for asked in self.line if asked.holder == worker and asked.claimed_by[0] == nonce]
        return sorted(held, key=lambda asked: asked.claimed_by[1])

    def _lease(self, taken: Sequence[Asked]) -> list[RolloutRequest]:
        for asked in taken:
            asked.leased_at = self.now
        return [msgspec.structs.replace(asked.request, attempts=asked.attempts) for asked in taken]

    def renew(self, worker: str, request_ids: Sequence[str]) -> list[str]:
        self.hear(worker)
        kept = []
        for request_id in request_ids:
            asked = self.find(request_id)
            if asked and asked.holder == worker:
                asked.leased_at = self.now
                kept.append(request_id)
        return kept

    def expire(self) -> None:
        for asked in [a for a in self.line if a.holder and self.now - a.leased_at >= self.lease_s]:
            self._attempt_failed(asked, "lease_over")

    def fail(self, worker: str, request_id: str, *, reason: str, detail: str) -> str:
        self.hear(worker)
        asked = self.find(request_id)
        if asked is None or asked.holder != worker:
            return "not_leased"
        self.failures += 1
        self.last_failure = (f"{reason}: {detail}" if detail else reason)[:500]
        self.counters[f"failed_groups:{reason}"] += 1
        return self._attempt_failed(asked, reason)

    def _attempt_failed(self, asked: Asked, reason: str) -> str:
        asked.holder, asked.attempts = "", asked.attempts + 1
        if asked.attempts < self.max_attempts:
            return "requeued"
        self._drop(asked, reason)
        return "dropped"

    def _drop(self, asked: Asked, reason: str) -> None:
        self._settle(asked)
        self.counters[f"dropped_requests:{reason}"] += 1
        self.fresh_dropped += asked.request.purpose is Purpose.FRESH

    def _settle(self, asked: Asked) -> None:
        request = asked.request
        self.line.remove(asked)
        self.settled[request.request_id] = self.tables.step
        if request.purpose is Purpose.EVALUATE:
            self.evaluations.setdefault(request.label, []).append(request.request_id)

    def release(self, worker: str) -> int:
        held = [asked for asked in self.line if asked.holder == worker]
        for asked in held:
            asked.holder = ""
        self.heard.pop(worker, None)
        self.nonces.pop(worker, None)
        return len(held)

    # -- groups

    def push(self, groups: Sequence[Incoming]) -> list[str]:
        for group in groups:
            asked = self.find(group.record.group_id)
            if asked and not _answers(group.record, asked.request):
                raise ContractError(group.record.group_id)
            if not asked and group.record.group_id in self.refs:
                first = self.groups[group.record.group_id]
                leases = [(g.record.worker_id, g.record.claimed_at) for g in (first, group)]
                if leases[0] == leases[1] and bytes(first.frame) != bytes(group.frame):
                    raise ContractError(group.record.group_id)
        results = [self._push(group) for group in groups]
        for group, result in zip(groups, results, strict=True):
            if result == "stored":
                self.hear(group.record.worker_id)
        return results

    def _push(self, group: Incoming) -> str:
        group_id = group.record.group_id
        asked = self.find(group_id)
        if asked is None:
            result = "duplicate" if group_id in self.settled else "unknown"
        elif group.record.policy_version < asked.request.min_version:
            asked.holder, result = "", "stale"
        else:
            result, self.failures = "stored", 0
            self._settle(asked)
            self.groups[group_id] = group
            if asked.request.purpose is Purpose.FRESH:
                self.fresh.append((group_id, asked.request))
            elif asked.request.purpose is Purpose.REEVALUATE:
                self.reevaluated.append(group_id)
        self.counters[f"pushed_groups:{result}"] += 1
        return result

    def evaluated(self, label: str) -> list[str]:
        return sorted(self.evaluations.get(label, []))

    def forget(self, label: str) -> None:
        mine = [a for a in self.line if a.request.purpose is Purpose.EVALUATE and a.request.label == label]
        self.line = [asked for asked in self.line if asked not in mine]
        for request_id in self.evaluations.pop(label, []):
            del self.settled[request_id]

    # -- assembly

    def readiness(self, step: int) -> Readiness:
        fresh = [asked.request for asked in self.line if asked.request.purpose is Purpose.FRESH]
        return Readiness(
            assembled=self.tables.step,
            num_fresh=len(self.fresh),
            round_left=self.rounds.get(step),
            failures_in_a_row=self.failures,
            last_failure=self.last_failure,
            num_open=len([request for request in fresh if request.step <= step]),
            fresh_bytes=self.fresh_bytes,
        )

    def read_step(self, step: int, num_fresh: int) -> StepReading:
        view = View(
            tables=self.tables,
            fresh=tuple(self.records[group_id] for group_id, _ in self.fresh_in_order[:num_fresh]),
            reevaluated=tuple(self.records[group_id] for group_id in self.reevaluated),
            stale=tuple(self.stale),
        )
        return StepReading(step=step, ready=self.readiness(step), view=lambda: view)

    def fresh_requests(self, group_ids: Sequence[str]) -> list[RolloutRequest | None]:
        return [dict(self.fresh).get(group_id) for group_id in group_ids]

    def replace_stale(self, replacements: Sequence[Replacement], *, hold: bool = False) -> list[str]:
        asked = {
            item.result.group_id: self._ask(item.request, 0)
            for item in reversed(replacements)
            if item.result.group_id in dict(self.fresh)
        }
        here = [item for item in replacements if asked.get(item.result.group_id)]
        self.held_stale += [item.result.group_id for item in here if hold]
        gone = {item.result.group_id for item in here}
        self.fresh = [item for item in self.fresh if item[0] not in gone]
        for item in here:
            rewards = item.result.rewards
            self.counters[f"dropped_groups:{item.result.reason}:{round(sum(rewards))}/{len(rewards)}"] += 1
        self.stale = [item.result for item in here] + self.stale
        return [group_id for group_id, is_new in asked.items() if not is_new]

    def commit_assembly(self, assembly: Assembly) -> bool:
        is_there = {*assembly.fresh} <= dict(self.fresh).keys() and {*assembly.reevaluated} <= {*self.reevaluated}
        if assembly.step != self.tables.step + 1 or assembly.before.edits != self.tables.edits or not is_there:
            return False
        self.fresh = [item for item in self.fresh if item[0] not in assembly.fresh]
        self.reevaluated = [group_id for group_id in self.reevaluated if group_id not in assembly.reevaluated]
        self.tables = assembly.after
        self.batches[assembly.step] = assembly.batch
        self.compositions.append(assembly.composition)
        self.stale = self.stale[: len(self.stale) - assembly.num_stale]
        self.held_stale = [group_id for group_id in self.held_stale if group_id not in assembly.stale]
        if assembly.success_counts:
            self.success_counts_of_steps[assembly.step] = assembly.success_counts
        return True

    def batch(self, step: int) -> BatchRecord | None:
        return self.batches.get(step)

    def commit(self, step: int, checkpointed: int) -> None:
        self.committed = max(self.committed, step)
        self.checkpointed = max(self.checkpointed, checkpointed)
        self.batches = {old: batch for old, batch in self.batches.items() if old > checkpointed}
        first = self.checkpointed - REMEMBERED_STEPS
        evaluated = {request_id for ids in self.evaluations.values() for request_id in ids}
        self.settled = {i: step for i, step in self.settled.items() if step >= first or i in evaluated}
        behind = [step for step in self.issued if step <= self.checkpointed]
        self.issued -= set(sorted(behind)[:-1])

    def resume(self, step: int) -> None:
        newest = self.tables.step
        missing = [later for later in range(step + 1, newest + 1) if later not in self.batches]
        if step > newest or missing:
            raise ContractError(str(missing[:1] or newest + 1))
        for asked in self.line:
            asked.holder = ""
        self.nonces = {}
        self.progress = Progress(step=step, policy_version=min(step, self.progress.policy_version))
        self.committed, self.failures = step, 0
        self.commit(step, step)

    def report(self, progress: Progress) -> None:
        self.progress = Progress(
            step=max(self.progress.step, progress.step),
            policy_version=max(self.progress.policy_version, progress.policy_version),
        )

    # -- what prompt selectors learn from

    def success_counts(self, after: int, limit: int) -> list[bytes]:
        page = []
        for step in range(after + 1, after + 1 + limit):
            if step not in self.success_counts_of_steps:
                break
            page.append(self.success_counts_of_steps[step])
        return page

    def selector_state(self) -> SelectorState:
        return self.selector

    def keep_selector_state(self, state: SelectorState) -> bool:
        is_newer = state.round > self.selector.round
        if is_newer:
            self.selector = state
            self.success_counts_of_steps = {
                s: data for s, data in self.success_counts_of_steps.items() if s > state.through
            }
        return is_newer

    # -- by hand

    def drop_group(self, group_id: str) -> str:
        named = {request_id for ids in self.evaluations.values() for request_id in ids}
        if group_id in dict(self.fresh):
            table, self.fresh = "fresh", [item for item in self.fresh if item[0] != group_id]
            self.fresh_dropped += 1
        elif group_id in self.reevaluated:
            table, self.reevaluated = "reevaluated", [other for other in self.reevaluated if other != group_id]
        elif group_id in named and group_id in self.groups:
            table = "evaluated"
            del self.groups[group_id]
        else:
            return ""
        self.counters["dropped_groups:by_hand"] += 1
        return table

    def drop_request(self, request_id: str) -> bool:
        asked = self.find(request_id)
        if asked is not None:
            self._drop(asked, "by_hand")
        return asked is not None

    def edit_tables(self, before: Tables, after: Tables) -> bool:
        is_newest = before == self.tables
        self.tables = replace(after, edits=before.edits + 1) if is_newest else self.tables
        return is_newest

    # -- looking, and the whole state

    def workers(self) -> dict[str, int]:
        """Worker -> its leases, of those that hold something or were heard of within the hour."""
        held = Counter(asked.holder for asked in self.line)
        return {w: held[w] for w, at in self.heard.items() if held[w] or self.now - at < SHOWN_SECONDS}

    def image(self) -> Image:
        order = [*self.claim_order(Purpose.REEVALUATE), *self.claim_order(Purpose.FRESH)]
        kept = [stat.group_id for stat in self.tables.high]
        kept += [group_id for batch in self.batches.values() for group_id in batch.held]
        own = {group_id for group_id, _ in self.fresh} | set(self.reevaluated)
        return Image(
            progress=self.progress,
            committed=self.committed,
            checkpointed=self.checkpointed,
            cursor=self.cursor,
            fresh_dropped=self.fresh_dropped,
            tables=self.tables,
            open_requests=tuple(msgspec.structs.replace(asked.request, attempts=asked.attempts) for asked in order),
            fresh=tuple(FreshGroup(record=self.records[i], request=r) for i, r in self.fresh_in_order),
            reevaluated=tuple(self.records[group_id] for group_id in self.reevaluated),
            records={group_id: self.records[group_id] for group_id in kept if group_id not in own},
            bad_prompts=self.bad_prompts,
            batches=tuple(self.batches[step] for step in sorted(self.batches)),
            compositions=tuple(self.compositions),
            rounds=self.rounds,
            stale=tuple(reversed(self.stale)),
            counters=dict(self.counters),
            fresh_spares=self.fresh_spares,
            success_counts=dict(self.success_counts_of_steps),
            selector=self.selector,
        )

    def restored(self, image: Image, frames: Iterable[tuple[str, bytes]]) -> Model:
        """What a store holds that took this image."""
        records = image.all_records
        return replace(
            self,
            line=[
                Asked(msgspec.structs.replace(request, attempts=0), request.attempts) for request in image.open_requests
            ],
            settled=dict.fromkeys(image.references, image.tables.step),
            groups={
                group_id: Pushed(record=records[group_id], frame_name="", frame=frame) for group_id, frame in frames
            },
            fresh=[(group.record.group_id, group.request) for group in image.fresh],
            reevaluated=[record.group_id for record in image.reevaluated],
            evaluations={},
            issued=set(image.rounds),
            tables=image.tables,
            batches={batch.step: batch for batch in image.batches},
            compositions=list(image.compositions),
            stale=list(reversed(image.stale)),
            held_stale=[],
            counters=Counter(image.counters),
            heard={},
            nonces={},
            progress=image.progress,
            committed=image.committed,
            checkpointed=image.checkpointed,
            cursor=image.cursor,
            fresh_dropped=image.fresh_dropped,
            fresh_spares=image.fresh_spares,
            success_counts_of_steps=dict(image.success_counts),
            selector=image.selector,
            failures=0,
            last_failure="",
        )


def _is_repeated_or_older(nonce: str, newest: str) -> bool:
    client, number = nonce.rsplit("-", 1)
    return newest in [f"{client}-{later}" for later in range(int(number), 1000)]


def _answers(record: GroupRecord, request: RolloutRequest) -> bool:
    asked = (request.purpose, request.step, request.group_size, request.prompt.prompt_id, request.label)
    return asked == (record.purpose, record.step, len(record.rewards), record.prompt_id, record.label)
