"""Client of the buffer service: one method per use case, the same error classes on both sides of the wire.

    push   GET /room --there is room--> frames to Redis (`frame_transfer.py`) --> POST /groups: heads, names, digests
             ^                                                              |
             +------- 429: the frames stay in Redis, fresh groups wait -----+        next: buffer_service/ingest.py

    pull   POST /batches/t --header, [id, bytes, digest], ...--> frames from Redis --> checked --> batch (learner/)
                                                                   | not what was announced
                               POST /batches/t/bad-frames: the service checks, names and counts the bad ones;
                               the batch continues without those that it confirms

Every call is idempotent and is repeated until `retry_s` has passed. `BufferClient` is thread-safe; coroutines call it
by `asyncio.to_thread`. Needs numpy, msgspec, xxhash, redis and urllib3, but neither torch nor the rest of BAPO.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Self

from bapo.core.batch_items import without_groups
from bapo.core.call_limits import (
    MAX_GROUPS,
    MAX_RENEWALS,
    MAX_REQUEST_BYTES,
    MAX_REQUESTS,
    in_parts,
    in_parts_by_size,
)
from bapo.core.codec import (
    PushedGroup,
    frame_problem,
    pack_batch_frames,
    pack_push,
    read_group_header,
    request_from_map,
    unpack_batch,
    unpack_group,
    unpack_pull,
)
from bapo.core.errors import ContractError, DeadlineError, FrameError, FullError, UnavailableError
from bapo.core.frames import frame_digest, frame_head, split_frames
from bapo.core.journal import pack_entries, unpack_entries
from bapo.core.json_values import Json, from_map, to_json, to_map
from bapo.core.success_counts import SuccessCounts, unpack_kept_state, unpack_packed_list, unpack_success_counts
from bapo.core.types import Batch, Group, HardPrompt, Progress, Prompt, Purpose, RolloutRequest
from bapo.runtime.auth.api_tokens import Token
from bapo.runtime.logs import RateLimitedFilter
from bapo.transport.frame_transfer import FrameTransfer
from bapo.transport.messages import BufferStatus, WorkerLeases
from bapo.transport.service_client import ServiceClient, quoted

__all__ = ["BufferClient", "BufferStatus", "WorkerLeases"]

log = logging.getLogger(__name__)

SNAPSHOT_WAIT_S = 300.0
FULL_S = 3600.0
"""How long a push waits for room: the learner may restart or write a checkpoint meanwhile."""
MAX_PUSH_BYTES = 32 << 20
"""Frames of one push call; more travel in several calls."""
ROOM_S = 10.0
"""Longest long poll for room."""
ROOM_KNOWN_S = 1.0
"""How long an answer that there is room stays valid."""
POLL_S = 10.0
"""Longest long poll for a batch; a wait consists of several, each of which reports its reason."""
READS = 3
"""Attempts to read a batch whose frames are corrupt here but intact in the buffer."""
FRAME = bytes | bytearray | memoryview
_waiting = RateLimitedFilter(30.0)


class BufferClient:
    """The buffer service of one run."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        retry_s: float = 60.0,
        full_s: float = FULL_S,
        token: str | Token | None = None,
        direct: Literal["auto", "off"] = "auto",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            url: `http://host:port`; of several replicas, with commas between them.
            timeout_s: longest silence of one call.
            retry_s: how long a call is repeated while the service is down.
            full_s: how long a push waits while the buffer is full.
            token: API token; None: from BAPO_TOKEN_FILE or BAPO_TOKEN, if set.
            direct: auto: frames go directly to and from Redis where the service allows it and it is reachable; off:
                all frames go through the service.
            now: monotonic clock, in seconds, for the wait for a batch.
        """
        peer: dict[str, Any] = {"timeout_s": timeout_s, "retry_s": retry_s, "full_s": full_s, "token": token}
        self._arguments = {"url": url, "direct": direct, "now": now, **peer}
        self._service = ServiceClient("the buffer service", url, **peer)
        self._frames = FrameTransfer(self._service, timeout_s=timeout_s, direct=direct)
        self._pusher = Pusher(self._service, self._frames, full_s=full_s)
        self._puller = Puller(self._service, self._frames, now=now)
        self._claim_keys = ClaimKeys()

    @property
    def url(self) -> str:
        return self._service.url

    def close(self) -> None:
        """Close idle connections; the next call opens one."""
        self._service.close()
        self._frames.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., BufferClient], tuple[object, ...]]:
        """Pickled by its arguments: a spawned process or Ray actor creates its own client."""
        return partial(type(self), **self._arguments), ()

    # -- work: scheduler and workers --------------------------------------------------------------------------

    def enqueue(
        self, requests: Iterable[RolloutRequest], *, cursor: int | None = None, spares: int | None = None
    ) -> int:
        """Request groups; known request ids are ignored. More than 4,096 requests or 16 MiB of them travel in several
        calls, except with a cursor.

        Args:
            cursor: fresh requests ever enqueued, including these. Adds nothing if it is not above the stored one, or
                if the first of these requests is beyond it (planned before a restore). Such a call is atomic: at most
                what one call may carry.
            spares: how many of the cursor are beyond B per step; stored with it.
        Returns: how many were new.
        """
        sent = [to_json(to_map(request), f"request {request.request_id}") for request in requests]
        end = to_json({"cursor": cursor, "spares": spares}, "enqueue").replace(b"{", b"", 1)
        accepted = 0
        for part in in_parts_by_size(sent, MAX_REQUESTS, MAX_REQUEST_BYTES, len) if cursor is None else [sent]:
            body = Json(b'{"requests": [%b], %b' % (b",".join(part), end))
            accepted += int(self._service.call("POST", "/requests", body=body).json()["accepted"])
        return accepted

    def claim(self, worker_id: str, *, limit: int, policy_version: int, wait_s: float = 0.0) -> list[RolloutRequest]:
        """Lease at most `limit` requests that allow `policy_version`.

        Idempotent: if a response was lost, the worker's next claim returns the same leases (possibly more than
        `limit`). One claim per worker at a time.

        Args:
            wait_s: how long to wait for the first request; [] after that.
        """
        with self._claim_keys.claiming(worker_id) as key:
            body = {
                "worker_id": worker_id,
                "nonce": key,
                "limit": limit,
                "policy_version": policy_version,
                "wait_s": wait_s,
            }
            answer = self._service.call("POST", "/requests/claim", body=body, wait_s=wait_s)
            return [request_from_map(fields) for fields in answer.json()["requests"]]

    def end_claim(self, worker_id: str) -> None:
        """End the wait of this worker's open claim, if there is one. Raises: UnavailableError, without a retry."""
        self._service.call("POST", "/requests/claim/end", body={"worker_id": worker_id}, retry_s=0.0)

    def renew(self, worker_id: str, request_ids: Sequence[str]) -> list[str]:
        """Extend leases by `buffer.lease_s`; returns the ids still leased to the worker."""
        held: list[str] = []
        for part in in_parts(list(request_ids), MAX_RENEWALS):
            body = {"worker_id": worker_id, "request_ids": part}
            held += self._service.call("POST", "/requests/renew", body=body).json()["request_ids"]
        return held

    def fail(self, worker_id: str, request_id: str, *, reason: str, detail: str = "") -> None:
        """Report a group that could not be sampled or graded; it is re-sampled up to `buffer.max_attempts` times.

        Args:
            reason: one bounded word (a metric label), for example `engine`, `verifier_timeout`.
            detail: free text.
        """
        body = {"worker_id": worker_id, "request_id": request_id, "reason": reason, "detail": detail}
        self._service.call("POST", "/requests/fail", body=body)

    def release(self, worker_id: str) -> int:
        """Return all leases of a dead worker to the queue, without counting an attempt. Returns: how many."""
        return int(self._service.call("POST", "/requests/release", body={"worker_id": worker_id}).json()["released"])

    def append_journal(self, worker_id: str, request_id: str, first: int, entries: Sequence[bytes]) -> tuple[str, int]:
        """Store the entries `first` and following of a leased request's journal, durably; a repeated call is harmless.

        Returns: `ok`, `not_held` (the worker has no lease of it) or `gap` (they do not follow), and the number of
            entries of the journal.
        """
        query = {"worker_id": worker_id, "first": str(first)}
        path, body = f"/requests/{quoted(request_id)}/journal", pack_entries(entries)
        answer = self._service.call("POST", path, body=body, query=query).json()
        return str(answer["result"]), int(answer["num_entries"])

    def read_journal(self, request_id: str) -> list[bytes]:
        """The entries of a request's journal, in order."""
        return unpack_entries(self._service.call("GET", f"/requests/{quoted(request_id)}/journal").body)

    def push(self, frames: Sequence[bytes]) -> dict[str, str]:
        """Push groups; returns when they are durable in Redis.

        Args:
            frames: from `bapo.core.codec.pack_group`; more than 1,024 or 32 MiB of them travel in several calls, and
                fresh groups apart from the others.
        Returns: group id -> `stored`; `duplicate` (already there); `stale` (sampled with older weights than the request
            allows: it is re-sampled); `unknown` (never requested, or deleted). None needs a second push.
        Raises: ContractError when one frame is malformed or contradicts its request: nothing of its call is stored.
        """
        return self._pusher.push(frames)

    # -- batches: learner -------------------------------------------------------------------------------------

    def batch(self, step: int, *, timeout_s: float, on_wait: Callable[[str], None] | None = None) -> Batch:
        """D_t. The same step has the same batch until a checkpoint after it is committed.

        Args:
            timeout_s: longest time without progress; each group that arrives, for any purpose, restarts it.
            on_wait: called every few seconds with what the batch waits for.
        Raises: DeadlineError with the buffer's reason after `timeout_s` without progress; UnavailableError when too
            many groups in a row failed, or the service stays down; ContractError for a step that is neither next nor
            retained.
        """
        return unpack_batch(self.batch_frame(step, timeout_s=timeout_s, on_wait=on_wait))

    def batch_frame(self, step: int, *, timeout_s: float, on_wait: Callable[[str], None] | None = None) -> bytes:
        """The batch, packed: for `bapo.core.codec.unpack_batch`. Otherwise as `batch`."""
        return self._puller.frame(step, timeout_s=timeout_s, on_wait=on_wait)

    def untrained(self, step: int) -> list[Group]:
        """Groups that the assembly of a retained batch read and left out: all, or a sample of
        `diagnostics.texts_mb`. Raises: ContractError when a checkpoint has released the batch.
        """
        body = self._service.call("GET", f"/batches/{step}/untrained").body
        return [unpack_group(frame) for frame in split_frames(body)]

    def commit(self, step: int, *, checkpointed: int) -> bool:
        """Batch `step` is trained. Batches up to the durable checkpoint `checkpointed` are released.

        Returns: whether a checkpoint is due now, because retained batches are filling Redis.
        """
        answer = self._service.call("POST", f"/batches/{step}/commit", body={"checkpointed": checkpointed})
        return bool(answer.json()["checkpoint_wanted"])

    def progress(self, *, seen_step: int | None = None, wait_s: float = 0.0) -> Progress:
        """The last reported progress; Progress(step=0, policy_version=0) before the first.

        Args:
            seen_step: return once the learner is in another step, or after `wait_s`.
        """
        query = {"wait_s": f"{wait_s:.3f}"}
        if seen_step is not None:
            query["seen_step"] = str(seen_step)
        fields = self._service.call("GET", "/progress", query=query, wait_s=wait_s).json()
        return from_map(fields, Progress, "progress")

    def report_progress(self, progress: Progress) -> None:
        """Report the learner's step and version. They never decrease: lower values are ignored."""
        self._service.call("PUT", "/progress", body=to_map(progress))

    # -- hard prompts and evaluation --------------------------------------------------------------------------

    def hard_prompts(self) -> list[tuple[HardPrompt, Prompt]]:
        """B_bad, oldest first."""
        entries = self._service.call("GET", "/hard-prompts").json()["hard_prompts"]
        what = "hard prompt"
        return [(from_map(one, HardPrompt, what), from_map(one.get("prompt"), Prompt, what)) for one in entries]

    def reevaluate(self, step: int, requests: Sequence[RolloutRequest]) -> None:
        """Issue the re-evaluation round of step `step`, once: a second call of the same step does nothing."""
        body = {"requests": [to_map(request) for request in requests]}
        self._service.call("POST", f"/reevaluations/{step}", body=body)

    def compositions(self, *, limit: int) -> list[dict[str, Any]]:
        """Compositions of the newest batches, newest first."""
        items = self._service.call("GET", "/batches", query={"limit": str(limit)}).json()["items"]
        return [dict(line) for line in items]

    def collect(self, label: str) -> list[Group]:
        """The finished groups of one evaluation, ordered by id."""
        body = self._service.call("GET", f"/evaluations/{quoted(label)}").body
        return [unpack_group(frame) for frame in split_frames(body)]

    def forget(self, label: str) -> None:
        """Delete the groups and open requests of one evaluation."""
        self._service.call("DELETE", f"/evaluations/{quoted(label)}")

    # -- prompt selectors: scheduler ---------------------------------------------------------------------------

    def success_counts(self, after: int, *, limit: int = 64) -> list[SuccessCounts]:
        """Success counts of the fresh groups of the steps after + 1, after + 2, ..., at most `limit` steps.

        Stored only for a selector that learns, until a selector state includes them.
        """
        body = self._service.call("GET", "/success-counts", query={"after": str(after), "limit": str(limit)}).body
        return [unpack_success_counts(data) for data in unpack_packed_list(body)]

    def selector_state(self) -> tuple[int, int, bytes]:
        """(round, last step whose success counts are included, state): (0, 0, b"") before the first."""
        return unpack_kept_state(self._service.call("GET", "/selector").body)

    def keep_selector_state(self, round_: int, through: int, data: bytes) -> None:
        """Store a selector's state, once per round; success counts of the steps up to `through` are deleted."""
        self._service.call("PUT", f"/selector/{round_}", query={"through": str(through)}, body=data)

    # -- state ------------------------------------------------------------------------------------------------

    def status(self) -> BufferStatus:
        """Keys that a newer service adds are ignored."""
        return from_map(self._service.call("GET", "/status").json(), BufferStatus, "buffer status")

    def snapshot(self) -> bytes:
        """The state of the run, as one consistent binary with a checksum."""
        return self._service.call("POST", "/snapshot", wait_s=SNAPSHOT_WAIT_S).body

    def restore(self, data: bytes) -> None:
        """Replace the state of the run by a snapshot. Raises: ContractError for a damaged one."""
        self._service.call("POST", "/restore", body=data, wait_s=SNAPSHOT_WAIT_S)

    def resume(self, step: int) -> None:
        """Resume after checkpoint `step`: all leases are released, batches after it are served again.

        Raises: ContractError if a batch after `step` is missing, or a restore was interrupted:
            restore the checkpoint's snapshot first.
        """
        self._service.call("POST", "/resume", body={"step": step})

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the service and its Redis respond. Raises: DeadlineError with the last reason."""
        self._service.wait_ready(timeout_s, "the buffer was not ready")


class Pusher:
    """Push groups to one buffer service. Thread-safe."""

    def __init__(self, peer: ServiceClient, frames: FrameTransfer, *, full_s: float) -> None:
        """`full_s`: how long a push waits for room."""
        self._service, self._frames, self._full_s = peer, frames, full_s
        self._room_until = 0.0
        """Monotonic time until which room is known to exist; -inf after a refusal."""

    def push(self, frames: Sequence[bytes]) -> dict[str, str]:
        """Group id -> result. Raises: as `BufferClient.push`; FullError when there was no room for `full_s`."""
        results: dict[str, str] = {}
        for part in filter(None, in_parts_by_size(_checked(frames), MAX_GROUPS, MAX_PUSH_BYTES, len)):
            fresh: list[bytes] = []
            others: list[bytes] = []
            for frame in part:
                (fresh if read_group_header(frame).purpose is Purpose.FRESH else others).append(frame)
            # The others never wait for room: the learner may need them for the batch that makes room.
            for some, asks in ((others, False), (fresh, True)):
                results |= self._push(some, asks_room=asks) if some else {}
        return results

    def _push(self, frames: Sequence[bytes], *, asks_room: bool) -> dict[str, str]:
        deadline = time.monotonic() + self._full_s
        names: list[str] | None = None
        was_missing = False
        while True:
            has_room = False
            try:
                if asks_room and time.monotonic() > self._room_until:
                    query = {"wait_s": f"{self._wait_s(deadline):.3f}"}
                    self._service.call("GET", "/room", query=query, wait_s=ROOM_S, full_s=0.0)
                    self._room_until = time.monotonic() + ROOM_KNOWN_S
                has_room = True
                names = names or self._frames.put(frames)
                return self._admitted(frames, names)
            except FrameError:  # expired, or lost in a restart of Redis
                if was_missing:
                    raise
                was_missing, names = True, None
            except FullError as error:
                self._room_until = -math.inf
                if time.monotonic() + error.retry_after_s > deadline:
                    raise
                log.log(logging.WARNING if _waiting.is_due("full") else logging.DEBUG, "push is waiting: %s", error)
                if has_room:  # other workers took it, or Redis is out of memory
                    time.sleep(error.retry_after_s)

    def _wait_s(self, deadline: float) -> float:
        """Long-poll time for room: 0 for the first question, so that a wait is logged before it begins."""
        return min(ROOM_S, max(0.0, deadline - time.monotonic())) if self._room_until < 0 else 0.0

    def _admitted(self, frames: Sequence[bytes], names: Sequence[str]) -> dict[str, str]:
        pairs = zip(frames, names, strict=True)
        groups = [PushedGroup(bytes(frame_head(frame)), name, frame_digest(frame)) for frame, name in pairs]
        answer = self._service.call("POST", "/groups", body=pack_push(groups), full_s=0.0).json()
        self._room_until = time.monotonic() + ROOM_KNOWN_S if answer["room"] else -math.inf
        return dict(answer["groups"])


def _checked(frames: Sequence[bytes]) -> Iterator[bytes]:
    """Raises: ContractError for anything but frames, such as a group that was not packed."""
    if isinstance(frames, FRAME):
        raise ContractError("push expects a list of frames, got one frame: push([pack_group(group)])")
    for frame in frames:
        if not isinstance(frame, FRAME):
            found = type(frame).__name__
            raise ContractError(f"push expects frames, got {found}: push([pack_group(group)])")
        if not frame:
            raise ContractError("a frame is empty")
        yield frame


class Puller:
    """Pull batches from one buffer service."""

    def __init__(self, peer: ServiceClient, frames: FrameTransfer, *, now: Callable[[], float]) -> None:
        """`now`: monotonic clock, in seconds."""
        self._service, self._frames, self._now = peer, frames, now

    def frame(self, step: int, *, timeout_s: float, on_wait: Callable[[str], None] | None = None) -> bytes:
        """The batch of `step`, packed. Arguments and errors as in `BufferClient.batch`."""
        moved = self._now()
        reason, counts = "no response yet", None
        while (left := moved + timeout_s - self._now()) > 0:
            wait_s = min(POLL_S, left)
            query, retry_s = {"wait_s": f"{wait_s:.3f}"}, min(self._service.retry_s, left)
            answer = self._service.call("POST", f"/batches/{step}", query=query, wait_s=wait_s, retry_s=retry_s)
            if answer.status == 200:
                return self._read(step, answer.body)
            waiting = answer.json()
            reason, found = waiting["reason"], waiting.get("counts")
            if counts is not None and found != counts:
                moved = self._now()
            counts = found
            if on_wait is not None:
                on_wait(reason)
        raise DeadlineError(f"batch {step} is not ready, no progress for {timeout_s:.0f} s: {reason}")

    def _read(self, step: int, answer: bytes) -> bytes:
        header, pulled = unpack_pull(answer)
        for _ in range(READS):
            found = self._frames.get([item.group_id for item in pulled], sum(item.num_bytes for item in pulled))
            frames = dict(zip(pulled, found, strict=True))
            problems = {item.group_id: frame_problem(frame, *item[1:]) for item, frame in frames.items()}
            suspects = [group_id for group_id, problem in problems.items() if problem]
            bad = self._confirmed(step, suspects) if suspects else {}
            if bad.keys() == set(suspects):
                sound = [frame for item, frame in frames.items() if frame is not None and item.group_id not in bad]
                kept = without_groups(header, [item.group_id for item in pulled], bad) if bad else header
                return pack_batch_frames(kept, sound)
        raise UnavailableError(f"the frames of batch {step} were corrupted in transfer {READS} times")

    def _confirmed(self, step: int, suspects: list[str]) -> dict[str, str]:
        """Group id -> problem of its frame, for the suspects that the service confirms."""
        answer = self._service.call("POST", f"/batches/{step}/bad-frames", body={"group_ids": suspects})
        bad = dict(answer.json()["bad"])
        for group_id, problem in bad.items():
            log.warning("batch %d continues without group %s: corrupt frame (%s)", step, group_id, problem)
        return bad


class ClaimKeys:
    """Idempotency keys of claims, "<random>-<number>": a worker repeats the key of a claim that failed.

    The buffer then returns the leases that the failed claim had made. Thread-safe: each step is one dict operation.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._client, self._pid = secrets.token_hex(8), os.getpid()
        self._numbers = itertools.count(1)
        self._newest: dict[str, str] = {}
        """Worker -> key of its newest claim."""
        self._failed: dict[str, str] = {}
        """Worker -> key of its newest claim, if that failed or was canceled."""

    @contextmanager
    def claiming(self, worker_id: str) -> Iterator[str]:
        """The key of one claim; the claim has failed when the block raises."""
        if self._pid != os.getpid():  # a fork must not repeat the claims of its parent
            self._reset()
        key = self._failed.pop(worker_id, None) or f"{self._client}-{next(self._numbers)}"
        self._newest[worker_id] = key
        try:
            yield key
        except BaseException:  # whatever ended it, its leases may exist
            if self._newest[worker_id] == key:  # the buffer only knows the newest key of a worker
                self._failed[worker_id] = key
            raise
