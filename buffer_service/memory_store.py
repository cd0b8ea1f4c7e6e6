"""The store in this process's memory: for tests, and to read what the Redis store does in one language.

Covers: everything that `buffer_service.store.Store` promises to the threads of one process.
Does not cover: persistence, several processes, memory limits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from bapo.errors import ContractError, FrameError, Refusal
from bapo.messages import BufferStatus
from bapo.types import Progress, Prompt, Purpose, RolloutRequest
from buffer_service.audit import Audit
from buffer_service.groups import GroupRecord, Incoming, PushFate, Replacement, check_answer
from buffer_service.image import Image
from buffer_service.memory_audit import audit_of
from buffer_service.memory_state import MemoryState, image_of, state_of
from buffer_service.memory_status import status_of
from buffer_service.store import FORGET_AFTER_STEPS, LAST_FAILURE_CHARS, MOST_COMPOSITIONS
from buffer_service.values import (
    Assembly,
    BatchRecord,
    Health,
    Look,
    Memory,
    Readiness,
    SelectorState,
    Tables,
    View,
    batch_is_missing,
)

P = ParamSpec("P")
R = TypeVar("R")
Clock = Callable[[], float]


def _atomic(method: Callable[Concatenate[MemoryStore, P], R]) -> Callable[Concatenate[MemoryStore, P], R]:
    @wraps(method)
    def locked(self: MemoryStore, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class MemoryStore:
    """State of one run in memory; see `buffer_service.store.Store`."""

    def __init__(
        self, run: str, *, lease_s: float, max_attempts: int, in_step_order: bool = False, now: Clock = time.monotonic
    ) -> None:
        self._run, self._lease_s, self._max_attempts, self._now = run, lease_s, max_attempts, now
        self._lock = threading.RLock()
        self._state = MemoryState(in_step_order=in_step_order)

    # -- requests

    @_atomic
    def enqueue(self, requests: Sequence[RolloutRequest], *, cursor: int | None, spares: int | None = None) -> int:
        if cursor is not None and not self._state.raise_cursor(cursor, spares):
            return 0
        return sum(self._state.ask(request) for request in requests)

    @_atomic
    def enqueue_round(self, step: int, requests: Sequence[RolloutRequest]) -> int:
        if step in self._state.rounds:
            return 0
        added = sum(self._state.ask(request) for request in requests)
        self._state.rounds[step] = self._state.num_again(step)
        return added

    @_atomic
    def claim(
        self, worker_id: str, *, limit: int, policy_version: int, with_fresh: bool = True, nonce: str = ""
    ) -> list[RolloutRequest]:
        self._state.return_expired(self._now(), self._max_attempts)
        self._state.hear(worker_id, self._now())
        claimed = self._state.leased_before(worker_id, nonce)
        if claimed is None:
            purposes = (Purpose.REEVALUATE, Purpose.EVALUATE, *([Purpose.FRESH] if with_fresh else []))
            claimed = self._state.claimable(purposes, policy_version)[:limit]
            if claimed:
                self._state.remember_claim(worker_id, nonce, claimed)
        for item in claimed:
            item.holder, item.deadline = worker_id, self._now() + self._lease_s
        return [item.request for item in claimed]

    @_atomic
    def renew(self, worker_id: str, request_ids: Sequence[str]) -> list[str]:
        self._state.hear(worker_id, self._now())
        opened = self._state.open
        held = [i for i in request_ids if i in opened and opened[i].holder == worker_id]
        for request_id in held:
            opened[request_id].deadline = self._now() + self._lease_s
        return held

    @_atomic
    def fail(self, worker_id: str, request_id: str, *, reason: str, detail: str) -> str:
        state = self._state
        state.hear(worker_id, self._now())
        item = state.open.get(request_id)
        if item is None or item.holder != worker_id:
            return "not_leased"
        state.failures_in_a_row += 1
        state.last_failure = (f"{reason}: {detail}" if detail else reason)[:LAST_FAILURE_CHARS]
        state.counters[f"failed_groups:{reason}"] += 1
        return state.attempt_failed(item, reason, self._max_attempts)

    @_atomic
    def release(self, worker_id: str) -> int:
        held = [item for item in self._state.open.values() if item.holder == worker_id]
        for item in held:
            item.holder = ""
        self._state.heard.pop(worker_id, None)
        self._state.claims.pop(worker_id, None)
        return len(held)

    # -- groups

    @_atomic
    def put_frame(self, name: str, frame: bytes | memoryview) -> None:
        self._state.incoming[name] = bytes(frame)

    @_atomic
    def note_bad_frame(self, record: GroupRecord, problem: str) -> bool:
        if record.group_id in self._state.bad_frames:
            return False
        self._state.bad_frames.add(record.group_id)
        self._state.counters[f"bad_frames:{record.worker_id}"] += 1
        return True

    @_atomic
    def push(self, groups: Sequence[Incoming]) -> list[str]:
        for mine in (group.record for group in groups):
            item = self._state.open.get(mine.group_id)
            check_answer(mine, item.request if item else None, self._state.records.get(mine.group_id))
        for group in groups:
            found = len(self._state.incoming.get(group.frame_name, b""))
            if found != group.record.num_bytes:
                mine = group.record
                self._state.counters[f"bad_frames:{mine.worker_id}"] += 1
                raise FrameError(
                    f"the frame of group {mine.group_id} of worker {mine.worker_id} has {found} bytes in Redis, not "
                    f"{mine.num_bytes}: write it again",
                    Refusal.FRAME,
                )
        fates = [self._state.admit(group) for group in groups]
        self._state.counters.update(f"pushed_groups:{fate}" for fate in fates)
        for group, fate in zip(groups, fates, strict=True):
            if fate == PushFate.STORED:
                self._state.hear(group.record.worker_id, self._now())
        return fates

    @_atomic
    def frames(self, group_ids: Sequence[str]) -> list[bytes | None]:
        return [self._state.frames.get(group_id) for group_id in group_ids]

    def records(self, group_ids: Sequence[str]) -> list[GroupRecord | None]:
        return [self._state.records.get(group_id) for group_id in group_ids]

    @_atomic
    def evaluated(self, label: str) -> list[str]:
        return sorted(self._state.evaluated.get(label, []))

    @_atomic
    def forget(self, label: str) -> None:
        self._state.forget(label)

    # -- assembly

    @_atomic
    def readiness(self, step: int) -> Readiness:
        return Readiness(
            assembled=self._state.tables.step,
            num_fresh=len(self._state.fresh),
            round_left=self._state.rounds.get(step),
            failures_in_a_row=self._state.failures_in_a_row,
            last_failure=self._state.last_failure,
            num_open=self._state.num_open(step),
            fresh_bytes=self._state.fresh_bytes,
        )

    @_atomic
    def look(self, step: int, num_fresh: int) -> Look:
        state = self._state
        view = View(
            tables=state.tables,
            fresh=tuple(state.records[group_id] for group_id, _ in state.fresh_in_order()[:num_fresh]),
            reevaluated=tuple(state.records[group_id] for group_id in state.reevaluated),
            stale=tuple(state.stale),
        )
        return Look(step=step, ready=self.readiness(step), view=lambda: view)

    @_atomic
    def fresh_requests(self, group_ids: Sequence[str]) -> list[RolloutRequest | None]:
        return [self._state.fresh.get(group_id) for group_id in group_ids]

    @_atomic
    def replace_stale(self, replacements: Sequence[Replacement], *, hold: bool = False) -> list[str]:
        return self._state.replace_stale(replacements, hold=hold)

    @_atomic
    def commit_assembly(self, assembly: Assembly) -> bool:
        state = self._state
        is_untouched = state.fresh.keys() >= set(assembly.fresh) and set(state.reevaluated) >= set(assembly.reevaluated)
        is_newest = (state.tables.step, state.tables.edits) == (assembly.step - 1, assembly.before.edits)
        if not (is_newest and is_untouched):
            return False
        state.fresh = {key: request for key, request in state.fresh.items() if key not in assembly.fresh}
        state.reevaluated = [i for i in state.reevaluated if i not in assembly.reevaluated]
        for group_id, change in assembly.reference_changes.items():
            state.refer(group_id, change)
        state.tables = assembly.after
        state.bad_prompts.update((prompt.prompt_id, prompt) for prompt in assembly.new_prompts)
        for prompt_id in assembly.left_bad:
            del state.bad_prompts[prompt_id]
        state.batches[assembly.step] = assembly.batch
        state.compositions = [assembly.composition, *state.compositions][:MOST_COMPOSITIONS]
        state.stale = state.stale[: len(state.stale) - assembly.num_stale]
        if assembly.outcomes:
            state.outcomes[assembly.step] = assembly.outcomes
        return True

    @_atomic
    def batch(self, step: int) -> BatchRecord | None:
        return self._state.batches.get(step)

    @_atomic
    def commit(self, step: int, checkpointed: int) -> None:
        state = self._state
        state.committed = max(step, state.committed)
        state.checkpointed = max(checkpointed, state.checkpointed)
        for old in [old for old in state.batches if old <= checkpointed]:
            for group_id in state.batches.pop(old).held:
                state.refer(group_id, -1)
        forgotten = state.checkpointed - FORGET_AFTER_STEPS
        state.done = {i: settled for i, settled in state.done.items() if settled >= forgotten}
        # The newest round up to the checkpoint stays: a scheduler that starts again asks for it again.
        newest = max((issued for issued in state.rounds if issued <= state.checkpointed), default=0)
        state.rounds = {issued: left for issued, left in state.rounds.items() if issued >= newest}

    @_atomic
    def resume(self, step: int) -> None:
        state = self._state
        assembled = state.tables.step
        needed = range(step + 1, assembled + 1) if step <= assembled else [assembled + 1]
        if missing := [later for later in needed if later not in state.batches]:
            raise ContractError(batch_is_missing(step, missing[0]))
        for item in state.open.values():
            item.holder = ""
        state.claims.clear()
        state.progress = Progress(step=step, policy_version=min(step, state.progress.policy_version))
        state.committed, state.failures_in_a_row = step, 0
        self.commit(step, step)

    # -- what prompt selectors learn from

    @_atomic
    def outcomes(self, after: int, limit: int) -> list[bytes]:
        return self._state.outcomes_behind(after, limit)

    @_atomic
    def selector_state(self) -> SelectorState:
        return self._state.selector

    @_atomic
    def keep_selector_state(self, state: SelectorState) -> bool:
        return self._state.keep_selector(state)

    # -- by hand

    @_atomic
    def drop_group(self, group_id: str) -> str:
        return self._state.drop_group(group_id)

    @_atomic
    def drop_request(self, request_id: str) -> bool:
        return self._state.drop_request(request_id)

    @_atomic
    def edit_tables(self, before: Tables, after: Tables) -> bool:
        return self._state.edit_tables(before, after)

    # -- looking

    @_atomic
    def progress(self) -> Progress:
        return self._state.progress

    @_atomic
    def report(self, progress: Progress) -> None:
        now = self._state.progress
        step, version = max(progress.step, now.step), max(progress.policy_version, now.policy_version)
        self._state.progress = Progress(step=step, policy_version=version)

    @_atomic
    def status(self) -> BufferStatus:
        self._state.return_expired(self._now(), self._max_attempts)
        return status_of(self._run, self._state, self._now())

    @_atomic
    def tables(self) -> Tables:
        return self._state.tables

    @_atomic
    def bad_prompts(self) -> dict[str, Prompt]:
        return dict(self._state.bad_prompts)

    @_atomic
    def compositions(self, offset: int, limit: int) -> tuple[int, list[Mapping[str, Any]]]:
        lines = self._state.compositions
        return len(lines), lines[offset : offset + limit]

    @_atomic
    def counters(self) -> dict[str, int]:
        return dict(self._state.counters)

    @_atomic
    def memory(self) -> Memory:
        return Memory(used=sum(len(frame) for frame in self._state.frames.values()), limit=0)

    @_atomic
    def audit(self) -> Audit:
        return audit_of(self._state)

    def health(self) -> Health:
        return Health(where="memory", persistent=False, detail="nothing survives this process")

    # -- whole state

    @_atomic
    def image(self) -> Image:
        return image_of(self._state)

    def restore(self, image: Image, frames: Iterable[tuple[str, bytes | memoryview]]) -> None:
        state = state_of(image, frames, in_step_order=self._state.in_step_order)
        with self._lock:
            self._state = state
