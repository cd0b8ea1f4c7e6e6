"""The store in Redis (6.2 or newer, or Valkey): every method is one atomic operation, safe from threads and processes.

    QUEUED --claim--> LEASED --push--> DONE, and its group is in `fresh`, `reevaluated` or `evaluated`
       ^                |
       +- lease expired, release, fail (at most `max_attempts` failed attempts, then DROPPED)

    fresh ---------commit_assembly---> batch (retained until a checkpoint after it), B_high, or deleted
    reevaluated ---commit_assembly---> batch, or deleted
    a frame is deleted once no table and no retained batch references its group

Each change is one Lua script, O(what it changes), never O(what the buffer holds). Frames are values of their own, which
scripts rename and measure but never read. Leases run on Redis' clock. The store knows no rule of any algorithm.

Each read is one transaction of plain commands: a script would pass the values on through Lua, and takes some 60 us to
begin when its code is not in the processor's caches, which at a low rate it never is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, takewhile
from typing import Any, NamedTuple

from bapo.core.call_limits import in_parts
from bapo.core.errors import ContractError, FrameError, Refusal
from bapo.core.types import Progress, Prompt, Purpose, RolloutRequest
from bapo.transport.frame_transfer import FRAME_TTL_MS
from bapo.transport.messages import BufferStatus
from buffer_service.state import (
    CONTRADICTIONS,
    Assembly,
    BatchRecord,
    GroupRecord,
    Health,
    Incoming,
    Memory,
    Readiness,
    Replacement,
    SelectorState,
    StepReading,
    Tables,
    View,
    contradiction,
    left_high,
    left_prompts,
    request_terms,
)
from buffer_service.store.invariants import Audit
from buffer_service.store.redis.connection import Arg, RedisLink
from buffer_service.store.redis.errors import RESTORING, RestoringError
from buffer_service.store.redis.inspection import (
    health_of,
    read_audit,
    status_of,
)
from buffer_service.store.redis.keys import Keys
from buffer_service.store.redis.rows import (
    pack,
    pack_tables,
    unpack,
    unpack_batch_record,
    unpack_prompt,
    unpack_record,
    unpack_request,
    unpack_result,
    unpack_tables,
)
from buffer_service.store.redis.snapshot import read_image, write_image
from buffer_service.store.run_image import Image

FRAMES_AT_ONCE = 32
"""Frames per reply: at most tens of megabytes."""
MAX_COMPOSITIONS = 1000
"""Entries of `GET /batches` that are kept."""
SHOWN_COMPOSITIONS = 8
"""Compositions in a status."""
LAST_FAILURE_CHARS = 500
FORGET_AFTER_STEPS = 20
"""A finished request is remembered until the newest checkpoint is this many steps after it: until then a late push of
its group is a `duplicate`, afterwards `unknown`. Requests of an evaluation are remembered until it is deleted. An id
that a table or a retained batch references is never enqueued again, even if its request is forgotten."""


class JournalAnswer(NamedTuple):
    """What came of an append."""

    result: str
    """ok, not_held or gap."""
    num_entries: int
    """Of the journal; unknown for `not_held`."""


class RedisStore:
    """State of one run in Redis.

    Fresh groups are consumed in arrival order; with `in_step_order` (max_steps_ahead = 0) in the order of their
    planned steps, so that each step gets its own groups, however workers race.

    All methods raise UnavailableError if Redis is unreachable or full, and StorageError if its disk is full.
    """

    def __init__(
        self, link: RedisLink, run: str, *, lease_s: float, max_attempts: int, in_step_order: bool = False
    ) -> None:
        self._link = link
        self._run_name = run
        self._keys = Keys(run)
        self._in_step_order = in_step_order
        self._newest_tables = (b"", Tables())
        """Cached tables, packed and unpacked: an assembly usually starts with the tables of the previous one."""
        self._settings: tuple[Arg, Arg] = (int(lease_s * 1000), max_attempts)

    def _run(self, script: str, args: Iterable[Arg] = (), frames_of: Iterable[str] = ()) -> Any:
        keys = [*self._keys.index, *(self._keys.group(group_id) for group_id in frames_of)]
        return self._link.run(script, keys, [*self._settings, *args])

    # -- requests

    def enqueue(self, requests: Sequence[RolloutRequest], *, cursor: int | None, spares: int | None = None) -> int:
        """Enqueue requests with new ids (see FORGET_AFTER_STEPS); returns their number.

        Args:
            cursor: total number of fresh requests so far, including these, stored with them; nothing happens unless it
                increases and the first of these requests is at most the next one.
            spares: how many of them are beyond B per step, stored with the cursor; None leaves it unchanged.
        """
        numbers: list[Arg] = ["" if number is None else number for number in (cursor, spares)]
        args = ["", *numbers, len(requests), *_request_args(requests)]
        return int(self._run("enqueue", args))

    def enqueue_round(self, step: int, requests: Sequence[RolloutRequest]) -> int:
        """Enqueue the re-evaluation round of a step once; returns the number of new requests (0 the second time).

        The round is complete when no re-evaluation of its step is open, including those enqueued separately.
        """
        return int(self._run("enqueue", [step, "", "", len(requests), *_request_args(requests)]))

    def claim(
        self, worker_id: str, *, limit: int, policy_version: int, with_fresh: bool = True, nonce: str = ""
    ) -> list[RolloutRequest]:
        """Lease requests with min_version <= policy_version: newest re-evaluations first, evaluations, fresh.

        For each active worker the newest nonce that leased anything is remembered, with its leases. A repeated nonce
        is a retry: it returns those leases that the worker still holds, extended, and nothing new. A lower nonce of
        the same client is a late claim whose caller has disconnected: it returns nothing.

        Args:
            nonce: "<client>-<number>" with increasing numbers; "": a new claim, which clears the remembered one.
        """
        reply = self._run("claim", [worker_id, nonce, limit, policy_version, int(with_fresh)])
        pairs = zip(reply[::2], reply[1::2], strict=True)
        # A request with missing content is skipped: its lease expires, and it is dropped after its last attempt.
        return [unpack_request(blob, int(attempts)) for blob, attempts in pairs if blob is not None]

    def renew(self, worker_id: str, request_ids: Sequence[str]) -> list[str]:
        """Extend leases; returns the ids still leased to the worker."""
        return [_text(held) for held in self._run("renew", [worker_id, len(request_ids), *request_ids])]

    def fail(self, worker_id: str, request_id: str, *, reason: str, detail: str) -> str:
        """Record a failed request: `requeued`, `dropped`, or `not_leased` (no change) if the worker has no lease."""
        text = f"{reason}: {detail}" if detail else reason
        return _text(self._run("fail", [worker_id, request_id, reason, text[:LAST_FAILURE_CHARS]]))

    def release(self, worker_id: str) -> int:
        """Return all leases of a worker to the queue and forget the worker; returns their number."""
        return int(self._run("release", [worker_id]))

    # -- journals of episodes

    def append_journal(self, worker_id: str, request_id: str, first: int, entries: Sequence[bytes]) -> JournalAnswer:
        """Store the entries `first` and following of a request's journal; a repeated call stores nothing.

        Returns: `ok`; `not_held` if the worker has no lease of the request; or `gap` and how many entries there are,
            if these do not follow.
        """
        args: list[Arg] = [worker_id, request_id, first, len(entries), *entries]
        word, *number = self._run("append_journal", args)
        return JournalAnswer(_text(word), int(number[0]) if number else first + len(entries))

    def read_journal(self, request_id: str) -> list[bytes]:
        """Entries of a request's journal, in order."""
        return list(self._run("read_journal", [request_id]))

    # -- groups

    def put_frame(self, name: str, frame: bytes | memoryview) -> None:
        """Store a frame under this name for `FRAME_TTL_MS`, or until its group is pushed. Raises: FullError."""
        with self._link.errors_named():
            self._link.client.psetex(self._keys.incoming(name), FRAME_TTL_MS, frame)

    def push(self, groups: Sequence[Incoming]) -> list[str]:
        """Store groups whose frames are in Redis; returns a `PushResult` value for each.

        Raises: ContractError if a group does not match its request or differs from the stored group of its lease;
            FrameError if a frame is missing or has the wrong length. Nothing is stored then.
        """
        records = [group.record for group in groups]
        columns: list[Iterable[Arg]] = [  # columns: unpacking single arguments costs Lua more than using them
            (record.group_id for record in records),
            (record.terms for record in records),
            (record.policy_version for record in records),
            (record.worker_id for record in records),
            map(self._rank, records),
            (record.num_bytes for record in records),
            map(pack, records),
        ]
        args = [*self._settings, len(groups), *chain.from_iterable(columns)]
        incoming = [self._keys.incoming(group.frame_name) for group in groups]
        keys = [*self._keys.index, *incoming, *(self._keys.group(record.group_id) for record in records)]
        results = [_text(word) for word in self._link.run("push", keys, args)]
        if results[0] in CONTRADICTIONS:
            word, group_id, detail = results
            answered = {record.group_id: record.terms for record in records}
            raise contradiction(word, group_id, detail, answered[group_id])
        if results[0] == "missing":
            _, group_id, found = results
            mine = next(record for record in records if record.group_id == group_id)
            raise FrameError(
                f"the frame of group {group_id} of worker {mine.worker_id} has {found} bytes in Redis, "
                f"expected {mine.num_bytes}: write it again; nothing of this push is stored",
                Refusal.FRAME,
            )
        return results

    def note_bad_frame(self, record: GroupRecord, problem: str) -> bool:
        """Count a corrupt frame of a stored group; False if it is already known."""
        return bool(self._run("bad_frame", [record.group_id, record.worker_id, problem]))

    def _rank(self, record: GroupRecord) -> int:
        return record.step if self._in_step_order and record.purpose is Purpose.FRESH else 0

    def frames(self, group_ids: Sequence[str]) -> list[bytes | None]:
        """Frames in the order of the ids; None if missing."""
        found: list[bytes | None] = []
        with self._link.errors_named():
            for part in in_parts(group_ids, FRAMES_AT_ONCE) if group_ids else ():
                found += self._link.client.mget([self._keys.group(group_id) for group_id in part])
        return found

    def records(self, group_ids: Sequence[str]) -> list[GroupRecord | None]:
        """Records in the order of the ids."""
        blobs = self._hash_values("records", group_ids)
        return [None if blob is None else unpack_record(blob) for blob in blobs]

    def evaluated(self, label: str) -> list[str]:
        """Sorted ids of the finished requests of one evaluation; dropped ones have no group."""
        # "label " <= member < "label!": a space is followed by "!" in ASCII.
        (members,) = self._read(("ZRANGEBYLEX", self._keys["evaluated"], f"[{label} ", f"({label}!"))
        return [_text(member).partition(" ")[2] for member in members]

    def forget(self, label: str) -> None:
        """Delete the groups, open requests and counter of an evaluation. Other requests with that label remain."""
        left = 1
        while left:  # only groups pushed in between: no request is open after the first pass
            group_ids = self.evaluated(label)
            left = int(self._run("forget", [label, len(group_ids), *group_ids], frames_of=group_ids))

    # -- assembly

    def readiness(self, step: int) -> Readiness:
        """Whether step `step` can be assembled."""
        return _readiness(self._link.at_once(*self._questions(step)))

    def read_step(self, step: int, num_fresh: int) -> StepReading:
        """`readiness`, and the view of an assembly that may use up to `num_fresh` fresh groups."""
        *numbers, tables, fresh, reevaluated, stale = self._link.at_once(
            *self._questions(step),
            ("GET", self._keys["tables"]),
            ("ZRANGE", self._keys["fresh"], *((0, num_fresh - 1) if num_fresh else (1, 0))),
            ("ZRANGE", self._keys["reevaluated"], 0, -1),
            ("LRANGE", self._keys["stale"], 0, -1),
        )
        view = partial(self._view, tables or b"", fresh, reevaluated, stale)
        return StepReading(step=step, ready=_readiness(numbers), view=view)

    def _questions(self, step: int) -> Sequence[Sequence[Arg]]:
        """What `_readiness` reads the answers of."""
        keys = self._keys
        return (
            ("HMGET", keys["meta"], "restoring", "assembled", "failures_in_a_row", "last_failure", "fresh_bytes"),
            ("ZCARD", keys["fresh"]),
            ("HGET", keys["rounds"], step),
            ("ZCOUNT", keys["planned"], "-inf", step),
        )

    def _view(
        self, tables: bytes, fresh: Sequence[bytes], reevaluated: Sequence[bytes], stale: Sequence[bytes]
    ) -> View:
        # A record that is missing was consumed since: by an assembly, which the fence finds, or by hand.
        blobs = self._hash_values("records", [*fresh, *reevaluated])
        first, second = blobs[: len(fresh)], blobs[len(fresh) :]
        return View(
            tables=self._tables_in(tables),
            fresh=tuple(unpack_record(blob) for blob in first if blob is not None),
            reevaluated=tuple(unpack_record(blob) for blob in second if blob is not None),
            stale=tuple(unpack_result(result) for result in stale),
        )

    def fresh_requests(self, group_ids: Sequence[str]) -> list[RolloutRequest | None]:
        """The requests of fresh groups, and open ones; None for a group that was consumed meanwhile."""
        blobs = self._hash_values("requests", group_ids)
        return [None if blob is None else unpack_request(blob) for blob in blobs]

    def replace_stale(self, replacements: Sequence[Replacement], *, hold: bool = False) -> list[str]:
        """Drop fresh groups, count them by reason and pass rate, and queue their replacements at the head.

        Returns: ids of the groups left unchanged, because the id of their replacement is in use.

        Args:
            hold: retain their frames until the assembly that reports them.
        """
        args: list[Arg] = [int(hold), len(replacements)]
        for item in reversed(replacements):
            args += [item.result.group_id, item.event, pack(item.result), *_request_args([item.request])]
        group_ids = [item.result.group_id for item in reversed(replacements)]
        return [_text(taken) for taken in self._run("replace_stale", args, frames_of=group_ids)]

    def commit_assembly(self, assembly: Assembly) -> bool:
        """Apply an assembly; False (no change) if its fence fails."""
        changes, losing = _change_args(assembly.reference_changes)
        prompts, left_bad = assembly.new_prompts, assembly.left_bad
        tables = pack_tables(assembly.after)
        args: list[Arg] = [
            assembly.step,
            assembly.before.edits,
            len(assembly.fresh), *assembly.fresh,
            len(assembly.reevaluated), *assembly.reevaluated,
            *changes,
            tables,
            len(prompts), *(part for p in prompts for part in (p.prompt_id, pack(p))),
            len(left_bad), *left_bad,
            pack(assembly.batch),
            pack(assembly.composition),
            MAX_COMPOSITIONS,
            assembly.num_stale,
            assembly.fresh_bytes,
            assembly.success_counts,
        ]  # fmt: skip
        is_done = bool(self._run("commit_assembly", args, frames_of=losing))
        if is_done:
            self._newest_tables = (tables, assembly.after)
        return is_done

    def _tables_in(self, data: bytes) -> Tables:
        packed, tables = self._newest_tables
        if packed != data:
            tables = unpack_tables(data)
            self._newest_tables = (data, tables)
        return tables

    def batch(self, step: int) -> BatchRecord | None:
        """A retained batch, which a store that outlives its process would still have now."""
        # Its assembler may still be waiting for the write.
        (blob,) = self._read(("HGET", self._keys["batches"], str(step)), written=True)
        return None if blob is None else unpack_batch_record(blob)

    def commit(self, step: int, checkpointed: int) -> None:
        """Mark batch `step` as trained and release the batches up to `checkpointed`. Neither value ever decreases."""
        (kept,) = self._read(("HKEYS", self._keys["batches"]))
        retained = [int(key) for key in kept]
        blobs = self._hash_values("batches", [str(old) for old in sorted(retained) if old <= checkpointed])
        released = [unpack_batch_record(blob) for blob in blobs if blob is not None]
        args: list[Arg] = [step, checkpointed, FORGET_AFTER_STEPS, len(released)]
        for batch in released:
            args += [batch.step, len(batch.held), *batch.held]
        self._run("commit", args, frames_of=[group_id for batch in released for group_id in batch.held])

    def resume(self, step: int) -> None:
        """Release all leases, forget all claims and reset the learner's progress to `step`, the newest checkpoint.

        Raises: ContractError if a batch after `step` is not retained, or a restore is in progress or was interrupted:
            a retry does not help, the learner must restore its snapshot.
        """
        try:
            missing = int(self._run("resume", [step, self._link.latest_ms()]))
        except RestoringError as error:
            raise ContractError(str(error)) from error
        if missing:
            raise ContractError(
                f"cannot resume after checkpoint {step}: batch {missing} is not in the buffer; "
                "restore the snapshot of that checkpoint first"
            )
        self.commit(step, step)

    # -- prompt selectors

    def success_counts(self, after: int, limit: int) -> list[bytes]:
        """Packed success counts of the steps after + 1, after + 2, ... up to the first gap, once they are durable."""
        steps = [str(step) for step in range(after + 1, after + 1 + limit)]
        if not steps:
            return []
        (kept,) = self._read(("HMGET", self._keys["success_counts"], *steps), written=True)
        return [blob for blob in takewhile(lambda blob: blob is not None, kept) if blob is not None]

    def selector_state(self) -> SelectorState:
        """The last stored selector state."""
        numbers = ("HMGET", self._keys["meta"], "selector_round", "selector_through")
        (last, through), data = self._read(numbers, ("GET", self._keys["selector"]))
        return SelectorState(round=int(last or 0), through=int(through or 0), data=data or b"")

    def keep_selector_state(self, state: SelectorState) -> bool:
        """Store a state and delete the success counts up to `through`; False (no change) unless its round is newer."""
        return bool(self._run("keep_selector_state", [state.round, state.through, state.data]))

    # -- maintenance

    def drop_group(self, group_id: str) -> str:
        """Delete a group that no batch has consumed; returns its table, or '' if there is none.

        fresh: `fresh_dropped` makes the scheduler request another one; reevaluated: as if its prompt had not been
        re-evaluated; evaluated: finished without a group, like a request that failed permanently.
        """
        (record,) = self.records([group_id])
        member = f"{record.label} {group_id}" if record else ""
        return _text(self._run("drop_group", [group_id, member], frames_of=[group_id]))

    def drop_request(self, request_id: str) -> bool:
        """Cancel an open request, queued or leased, as if its attempts were exhausted; False if it is not open.

        It finishes without a group: a fresh one counts into `fresh_dropped`, a round or an evaluation waits for one
        group less, and a push of its group is a `duplicate`.
        """
        return bool(self._run("drop_request", [request_id]))

    def edit_tables(self, before: Tables, after: Tables) -> bool:
        """Remove entries from B_bad and B_high; False (no change) if `before` is not current."""
        gone, left_bad = left_high(before, after), left_prompts(before, after)
        args: list[Arg] = [before.step, before.edits, pack_tables(replace(after, edits=before.edits + 1))]
        return bool(self._run("edit_tables", [*args, len(gone), *gone, len(left_bad), *left_bad], frames_of=gone))

    # -- inspection

    def progress(self) -> Progress:
        """The last reported progress."""
        step, version = self._hash_values("meta", ["step", "policy_version"])
        return Progress(step=int(step or 0), policy_version=int(version or 0))

    def report(self, progress: Progress) -> None:
        """Store the progress; its values never decrease."""
        self._run("report", [progress.step, progress.policy_version])

    def status(self) -> BufferStatus:
        """Read the status; expired leases are released first."""
        return status_of(self._run_name, self._run("status", [SHOWN_COMPOSITIONS]))

    def tables(self) -> Tables:
        """B_bad, B_high and thresholds after the newest assembly."""
        (data,) = self._read(("GET", self._keys["tables"]))
        return unpack_tables(data or b"")

    def bad_prompts(self) -> dict[str, Prompt]:
        """Prompt id -> prompt of B_bad."""
        found = self._read_map("bad_prompts")
        return {_text(prompt_id): unpack_prompt(blob) for prompt_id, blob in found.items()}

    def compositions(self, offset: int, limit: int) -> tuple[int, list[Mapping[str, Any]]]:
        """(total number, one page), newest first."""
        key = self._keys["compositions"]
        total, lines = self._read(("LLEN", key), ("LRANGE", key, offset, offset + limit - 1))
        return total, [unpack(line) for line in lines]

    def counters(self) -> dict[str, int]:
        """Event -> count over the run: `<what>:<reason>[:<k>/<G>]`."""
        return {_text(event): int(number) for event, number in self._read_map("counters").items()}

    def memory(self) -> Memory:
        """Used memory and maxmemory of Redis."""
        with self._link.errors_named():
            info = self._link.client.info("memory")
        return Memory(used=int(info["used_memory"]), limit=int(info.get("maxmemory", 0)))

    def audit(self) -> Audit:
        """Read the facts for `buffer_service.store.invariants`. O(size of the buffer); for operators."""
        return read_audit(self._link, self._keys)

    def health(self) -> Health:
        """Raises: UnavailableError if the store does not respond."""
        return health_of(self._link)

    # -- whole state

    def image(self) -> Image:
        """Read one consistent image."""
        return read_image(self._link, self._keys)

    def restore(self, image: Image, frames: Iterable[tuple[str, bytes | memoryview]]) -> None:
        """Replace the state of the run.

        If interrupted, either nothing has changed, or from then on every method raises UnavailableError and `resume`
        ContractError. Of two concurrent restores the later one succeeds; the other raises UnavailableError.
        """
        write_image(self._link, self._keys, image, frames, self._rank)

    def _hash_values(self, key: str, fields: Sequence[str | bytes]) -> list[bytes | None]:
        return list(*self._read(("HMGET", self._keys[key], *fields))) if fields else []

    def _read_map(self, key: str) -> dict[bytes, bytes]:
        """Read a whole hash of the index."""
        (found,) = self._read(("HGETALL", self._keys[key]))
        # RESP3 returns maps; RESP2, which a URL may select, returns alternating keys and values.
        return found if isinstance(found, dict) else dict(zip(found[::2], found[1::2], strict=True))

    def _read(self, *commands: Sequence[Arg], written: bool = False) -> list[Any]:
        """Replies of one moment. Raises: RestoringError while a restore is under way or was cut off.

        `written` as for `RedisLink.at_once`.
        """
        restoring, *found = self._link.at_once(("HEXISTS", self._keys["meta"], "restoring"), *commands, written=written)
        if restoring:
            raise RestoringError(RESTORING)
        return found


def _readiness(answers: Sequence[Any]) -> Readiness:
    """Raises: RestoringError."""
    (restoring, assembled, failures, reason, fresh_bytes), num_fresh, left, num_open = answers
    if restoring is not None:
        raise RestoringError(RESTORING)
    return Readiness(
        assembled=int(assembled or 0),
        num_fresh=num_fresh,
        round_left=None if left is None else int(left),
        failures_in_a_row=int(failures or 0),
        last_failure=(reason or b"").decode(),
        num_open=num_open,
        fresh_bytes=int(fresh_bytes or 0),
    )


def _text(value: bytes) -> str:
    return value.decode()


def _change_args(changes: Mapping[str, int]) -> tuple[list[Arg], list[str]]:
    """Arguments of commit_assembly.lua from group id -> change of its reference count: (the changes with their groups;
    the groups that lose references, in that order)."""
    by_change: dict[int, list[str]] = {}
    for group_id, change in changes.items():
        by_change.setdefault(change, []).append(group_id)
    args: list[Arg] = [len(by_change)]
    for change, group_ids in by_change.items():
        args += [change, len(group_ids), *group_ids]
    return args, [group_id for change, ids in by_change.items() if change < 0 for group_id in ids]


def _request_args(requests: Iterable[RolloutRequest]) -> list[Arg]:
    """Requests as flat arguments for enqueue.lua and others."""
    args: list[Arg] = []
    for request in requests:
        terms, blob = request_terms(request), pack(request)
        args += [request.purpose.value, request.min_version, request.request_id, terms, blob]
    return args
