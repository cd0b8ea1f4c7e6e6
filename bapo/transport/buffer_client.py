"""Talk to the buffer service: one method per use case, the same error classes on both sides of the wire.

Every call may be repeated without harm, so every call is: until `retry_s` has passed, while the service restarts or
its Redis is away. `BufferClient` is thread-safe; coroutines call it by `asyncio.to_thread`.
Needs numpy, msgpack, redis and urllib3 of all our dependencies: neither torch nor the rest of BAPO.
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
from typing import Any, Literal, Self

from bapo.core.batch_items import without_groups
from bapo.core.call_limits import (
    MOST_GROUPS,
    MOST_RENEWALS,
    MOST_REQUEST_BYTES,
    MOST_REQUESTS,
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
    request_map,
    unpack_batch,
    unpack_group,
    unpack_pull,
)
from bapo.core.errors import ContractError, DeadlineError, FrameError, FullError, UnavailableError
from bapo.core.frames import frame_digest, frame_head, split_frames
from bapo.core.json_values import Json, to_json
from bapo.core.success_counts import Outcomes, unpack_kept_state, unpack_outcomes, unpack_packed_list
from bapo.core.types import Batch, Group, HardPrompt, Progress, Prompt, Purpose, RolloutRequest
from bapo.runtime.auth.api_tokens import Token
from bapo.runtime.logs import Seldom
from bapo.transport.frame_transfer import FrameTransfer
from bapo.transport.messages import BufferStatus, WorkerLeases, hard_prompt_from_map, status_from_map
from bapo.transport.service_client import Peer, quoted

__all__ = ["BufferClient", "BufferStatus", "WorkerLeases"]

SNAPSHOT_WAIT_S = 300.0
FULL_S = 3600.0
"""A full buffer is alive and well: it waits for the learner, who may restart or write a checkpoint meanwhile."""


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
            retry_s: how long a call goes on against a service that is down.
            full_s: how long against one that says that it is full.
            token: what to send; None: what BAPO_TOKEN_FILE or BAPO_TOKEN holds, if anything.
            direct: auto: frames go to and from Redis itself, where the service allows it and it can be opened from
                here; off: never.
            now: seconds of a clock that only rises, by which a wait for a batch is measured.
        """
        self._made_with = {
            "url": url,
            "timeout_s": timeout_s,
            "retry_s": retry_s,
            "full_s": full_s,
            "token": token,
            "direct": direct,
            "now": now,
        }
        self._peer = Peer("the buffer service", url, timeout_s=timeout_s, retry_s=retry_s, full_s=full_s, token=token)
        self._frames = FrameTransfer(self._peer, timeout_s=timeout_s, direct=direct)
        self._pusher = Pusher(self._peer, self._frames, full_s=full_s)
        self._puller = Puller(self._peer, self._frames, now=now)
        self._nonces = ClaimNonces()

    @property
    def url(self) -> str:
        """Of the replica that is called."""
        return self._peer.url

    def close(self) -> None:
        """Close the connections that no call has now. The client goes on: its next call opens one."""
        self._peer.close()
        self._frames.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., BufferClient], tuple[object, ...]]:
        """Another process (spawned, a Ray actor) has a client of its own, made with the same arguments."""
        return _made_again, (type(self), self._made_with)

    # -- work: scheduler and workers --------------------------------------------------------------------------

    def enqueue(
        self, requests: Iterable[RolloutRequest], *, cursor: int | None = None, spares: int | None = None
    ) -> int:
        """Ask for groups; a request id that was asked for before is ignored. More than 4,096 requests, or 16 MiB of
        them, travel in several calls, unless there is a cursor.

        Args:
            cursor: fresh requests ever enqueued, these included; one that is not above the stored one adds nothing.
                Requests with a cursor are one call: at most what `bapo.transport.messages.first_call` leaves of them.
            spares: those of them beyond B per step; stored with the cursor.
        Returns: how many were new.
        """
        sent = [to_json(request_map(request), f"request {request.request_id}") for request in requests]
        end = to_json({"cursor": cursor, "spares": spares}, "enqueue").replace(b"{", b"", 1)
        accepted = 0
        # A cursor stands for all of them.
        for part in in_parts_by_size(sent, MOST_REQUESTS, MOST_REQUEST_BYTES) if cursor is None else [sent]:
            body = Json(b'{"requests": [%b], %b' % (b",".join(part), end))
            accepted += int(self._peer.call("POST", "/requests", body=body).json()["accepted"])
        return accepted

    def claim(self, worker_id: str, *, limit: int, policy_version: int, wait_s: float = 0.0) -> list[RolloutRequest]:
        """Lease at most `limit` requests that weights of `policy_version` may answer.

        A claim whose answer was lost leases nothing twice: repeated here, or by the worker's next claim after an
        error, it gets what it had leased (then perhaps more than `limit`). One claim of a worker at a time: of
        several at once only the newest is known again.

        Args:
            wait_s: wait so long for the first one; [] when there is none after that.
        """
        with self._nonces.claiming(worker_id) as nonce:
            return self._claim_as(nonce, worker_id, limit=limit, policy_version=policy_version, wait_s=wait_s)

    def _claim_as(
        self, nonce: str, worker_id: str, *, limit: int, policy_version: int, wait_s: float
    ) -> list[RolloutRequest]:
        body = {
            "worker_id": worker_id,
            "nonce": nonce,
            "limit": limit,
            "policy_version": policy_version,
            "wait_s": wait_s,
        }
        answer = self._peer.call("POST", "/requests/claim", body=body, wait_s=wait_s)
        return [request_from_map(fields) for fields in answer.json()["requests"]]

    def renew(self, worker_id: str, request_ids: Sequence[str]) -> list[str]:
        """Keep leases for another `buffer.lease_s`; returns the ids that the worker still holds."""
        held: list[str] = []
        for part in in_parts(list(request_ids), MOST_RENEWALS):
            body = {"worker_id": worker_id, "request_ids": part}
            held += self._peer.call("POST", "/requests/renew", body=body).json()["request_ids"]
        return held

    def fail(self, worker_id: str, request_id: str, *, reason: str, detail: str = "") -> None:
        """A group could not be sampled or graded: it is asked for again, whole, up to `buffer.max_attempts` times.

        Args:
            reason: one bounded word (a metric label), for example `engine`, `verifier_timeout`.
            detail: for people.
        """
        body = {"worker_id": worker_id, "request_id": request_id, "reason": reason, "detail": detail}
        self._peer.call("POST", "/requests/fail", body=body)

    def release(self, worker_id: str) -> int:
        """All leases of a dead worker return at once, and no attempt is counted. Returns: how many."""
        return int(self._peer.call("POST", "/requests/release", body={"worker_id": worker_id}).json()["released"])

    def push(self, frames: Sequence[bytes]) -> dict[str, str]:
        """Hand over groups; returns only when they are in Redis.

        Args: frames: from `bapo.core.codec.pack_group`; more than 1,024 or 32 MiB of them travel in several calls,
        and fresh
            groups in other ones than the rest.
        Returns: group id -> `stored`; `duplicate` (it was there already); `stale` (older weights than the request
            admits: it is asked for again); `unknown` (never asked for, or long forgotten). None needs a second push.
        Raises: ContractError when one frame is malformed or contradicts its request; nothing of its call is stored.
        """
        return self._pusher.push(frames)

    # -- batches: learner -------------------------------------------------------------------------------------

    def batch(self, step: int, *, timeout_s: float, on_wait: Callable[[str], None] | None = None) -> Batch:
        """D_t. The same step has the same batch until a checkpoint after it is committed.

        Args:
            timeout_s: how long without any progress: each group that arrives, for whatever purpose, starts it anew.
            on_wait: is told what the batch waits for, every few seconds.
        Raises: DeadlineError with the buffer's reason after `timeout_s` in which nothing moved; UnavailableError when
            too many groups in a row failed, or the service stays away; ContractError for a step that is not next and
            not retained.
        """
        return unpack_batch(self.batch_frame(step, timeout_s=timeout_s, on_wait=on_wait))

    def batch_frame(self, step: int, *, timeout_s: float, on_wait: Callable[[str], None] | None = None) -> bytes:
        """D_t as it travels (`bapo.core.codec.unpack_batch` opens it). Otherwise as `batch`."""
        return self._puller.frame(step, timeout_s=timeout_s, on_wait=on_wait)

    def untrained(self, step: int) -> list[Group]:
        """Groups that the assembly of a retained batch saw and did not train: all, or a sample of
        `diagnostics.texts_mb`. Raises: ContractError when a checkpoint has released the batch.
        """
        body = self._peer.call("GET", f"/batches/{step}/untrained").body
        return [unpack_group(frame) for frame in split_frames(body)]

    def commit(self, step: int, *, checkpointed: int) -> bool:
        """Batch `step` is trained. Batches up to the durable checkpoint `checkpointed` are released.

        Returns: whether a checkpoint is wanted now, because batches that wait for one are filling Redis.
        """
        answer = self._peer.call("POST", f"/batches/{step}/commit", body={"checkpointed": checkpointed})
        return bool(answer.json()["checkpoint_wanted"])

    def progress(self, *, seen_step: int | None = None, wait_s: float = 0.0) -> Progress:
        """The newest report; Progress(step=0, policy_version=0) before the first.

        Args:
            seen_step: answer as soon as the learner is in another step, at the latest after `wait_s`.
        """
        query = {"wait_s": f"{wait_s:.3f}"}
        if seen_step is not None:
            query["seen_step"] = str(seen_step)
        fields = self._peer.call("GET", "/progress", query=query, wait_s=wait_s).json()
        return Progress(step=fields["step"], policy_version=fields["policy_version"])

    def report_progress(self, progress: Progress) -> None:
        """Tell everybody where the learner is. Both numbers only rise: a lower one is ignored."""
        body = {"step": progress.step, "policy_version": progress.policy_version}
        self._peer.call("PUT", "/progress", body=body)

    # -- hard prompts and evaluation --------------------------------------------------------------------------

    def hard_prompts(self) -> list[tuple[HardPrompt, Prompt]]:
        """B_bad, oldest first."""
        entries = self._peer.call("GET", "/hard-prompts").json()["hard_prompts"]
        return [hard_prompt_from_map(fields) for fields in entries]

    def reevaluate(self, step: int, requests: Sequence[RolloutRequest]) -> None:
        """Issue the re-evaluation round of step `step`, once: a second call of the same step does nothing."""
        body = {"requests": [request_map(request) for request in requests]}
        self._peer.call("POST", f"/reevaluations/{step}", body=body)

    def compositions(self, *, limit: int) -> list[dict[str, Any]]:
        """What the newest batches were made of, newest first."""
        items = self._peer.call("GET", "/batches", query={"limit": str(limit)}).json()["items"]
        return [dict(line) for line in items]

    def collect(self, label: str) -> list[Group]:
        """All groups of one evaluation that are done, in the order of their ids."""
        body = self._peer.call("GET", f"/evaluations/{quoted(label)}").body
        return [unpack_group(frame) for frame in split_frames(body)]

    def forget(self, label: str) -> None:
        """Delete the groups and open requests of one evaluation."""
        self._peer.call("DELETE", f"/evaluations/{quoted(label)}")

    # -- what prompt selectors learn from: scheduler -----------------------------------------------------------

    def outcomes(self, after: int, *, limit: int = 64) -> list[Outcomes]:
        """What the fresh groups of the steps after + 1, after + 2, ... gave, as far as it is kept, at most `limit`.

        Kept only for a selector that learns, and until a state that stands for it is kept instead.
        """
        body = self._peer.call("GET", "/outcomes", query={"after": str(after), "limit": str(limit)}).body
        return [unpack_outcomes(data) for data in unpack_packed_list(body)]

    def evaluation_outcomes(self, label: str) -> Outcomes:
        """What the groups of one evaluation gave that are done, without their tokens."""
        body = self._peer.call("GET", f"/evaluations/{quoted(label)}/outcomes").body
        (data,) = unpack_packed_list(body)
        return unpack_outcomes(data)

    def selector_state(self) -> tuple[int, int, bytes]:
        """(round, step up to which outcomes are in it, what was kept): (0, 0, b"") before the first."""
        return unpack_kept_state(self._peer.call("GET", "/selector").body)

    def keep_selector_state(self, round_: int, through: int, data: bytes) -> None:
        """Keep what a selector has learnt, once per round; outcomes of the steps up to `through` are dropped."""
        self._peer.call("PUT", f"/selector/{round_}", query={"through": str(through)}, body=data)

    # -- state ------------------------------------------------------------------------------------------------

    def status(self) -> BufferStatus:
        """What the buffer holds, in numbers."""
        return status_from_map(self._peer.call("GET", "/status").json())

    def snapshot(self) -> bytes:
        """Everything that a resumed run needs of the buffer, as one consistent binary with a checksum."""
        return self._peer.call("POST", "/snapshot", wait_s=SNAPSHOT_WAIT_S).body

    def restore(self, data: bytes) -> None:
        """Replace all that this run has in the buffer by a snapshot. Raises: ContractError for a damaged one."""
        self._peer.call("POST", "/restore", body=data, wait_s=SNAPSHOT_WAIT_S)

    def resume(self, step: int) -> None:
        """A learner goes on after checkpoint `step`: all leases return, batches after it are handed out again.

        Raises: ContractError when the buffer does not hold all batches after `step`, or a restore of it was cut off:
            restore the checkpoint's snapshot first.
        """
        self._peer.call("POST", "/resume", body={"step": step})

    def wait_ready(self, timeout_s: float) -> None:
        """Return when the service and its Redis answer. Raises: DeadlineError with the last reason."""
        self._peer.wait_ready(timeout_s, "the buffer was not ready")


def _made_again(cls: Callable[..., BufferClient], arguments: dict[str, Any]) -> BufferClient:
    return cls(**arguments)


# A push: ask for room where that is not known, write the frames, then hand over the heads of the groups.
#
# GET /room --there is--> frames (`bapo.transport.frame_transfer`) --> POST /groups: head, name and digest of each
#     ^                                                         |
#     +------------- 429, and the frames stay where they are ---+   fresh groups only; the others never wait for room

log = logging.getLogger(__name__)

MOST_PUSH_BYTES = 32 << 20
"""Of the frames of one call; more travel in several."""
ROOM_S = 10.0
"""How long one question for room stays open."""
ROOM_KNOWN_S = 1.0
"""How long the room that an answer tells of is taken for granted."""
FRAME = bytes | bytearray | memoryview
SAID_S = 30.0
"""A buffer that stays full is worth a line this often: each push of each worker may have to wait."""
_waiting = Seldom(SAID_S)


class Pusher:
    """Pushes groups to one buffer service. Thread-safe."""

    def __init__(self, peer: Peer, frames: FrameTransfer, *, full_s: float) -> None:
        """`full_s`: how long a push waits for room."""
        self._peer, self._frames, self._full_s = peer, frames, full_s
        self._room_until = 0.0
        """By the monotonic clock; -inf: the newest answer was that there is none."""

    def push(self, frames: Sequence[bytes]) -> dict[str, str]:
        """Group id -> fate. Raises: as `BufferClient.push`; FullError when there was no room for `full_s`."""
        fates: dict[str, str] = {}
        for part in filter(None, in_parts_by_size(_checked(frames), MOST_GROUPS, MOST_PUSH_BYTES)):
            fresh: list[bytes] = []
            others: list[bytes] = []
            for frame in part:
                (fresh if read_group_header(frame).purpose is Purpose.FRESH else others).append(frame)
            # The learner may need the others for the batch that makes room: they ask for none.
            for some, asks in ((others, False), (fresh, True)):
                fates |= self._push(some, asks_room=asks) if some else {}
        return fates

    def _push(self, frames: Sequence[bytes], *, asks_room: bool) -> dict[str, str]:
        deadline = time.monotonic() + self._full_s
        names: list[str] | None = None
        was_missing = False
        while True:
            has_room = False
            try:
                if asks_room and time.monotonic() > self._room_until:
                    query = {"wait_s": f"{self._wait_s(deadline):.3f}"}
                    self._peer.call("GET", "/room", query=query, wait_s=ROOM_S, full_s=0.0)
                    self._room_until = time.monotonic() + ROOM_KNOWN_S
                has_room = True
                names = names or self._frames.put(frames)
                return self._admitted(frames, names)
            except FrameError:  # it has expired, or Redis was started again before it was written
                if was_missing:
                    raise
                was_missing, names = True, None
            except FullError as error:
                self._room_until = -math.inf
                if time.monotonic() + error.retry_after_s > deadline:
                    raise
                log.log(logging.WARNING if _waiting.is_due("full") else logging.DEBUG, "a push waits: %s", error)
                if has_room:  # others were faster, or Redis has no memory for what the batch lacks
                    time.sleep(error.retry_after_s)

    def _wait_s(self, deadline: float) -> float:
        """As long as room may take: nothing the first time, so that the wait is worth a line."""
        return min(ROOM_S, max(0.0, deadline - time.monotonic())) if self._room_until < 0 else 0.0

    def _admitted(self, frames: Sequence[bytes], names: Sequence[str]) -> dict[str, str]:
        pairs = zip(frames, names, strict=True)
        groups = [PushedGroup(bytes(frame_head(frame)), name, frame_digest(frame)) for frame, name in pairs]
        answer = self._peer.call("POST", "/groups", body=pack_push(groups), full_s=0.0).json()
        self._room_until = time.monotonic() + ROOM_KNOWN_S if answer["room"] else -math.inf
        return dict(answer["groups"])


def _checked(frames: Sequence[bytes]) -> Iterator[bytes]:
    """Raises: ContractError for what is none, a group for example that nobody has packed."""
    if isinstance(frames, FRAME):
        raise ContractError("push takes a list of frames, got one frame: push([pack_group(group)])")
    for frame in frames:
        if not isinstance(frame, FRAME):
            found = type(frame).__name__
            raise ContractError(f"push takes frames, got {found}: push([pack_group(group)])")
        if not frame:
            raise ContractError("a frame is empty")
        yield frame


# The learner's wait for a batch: long polls until it is there, then its frames, each of which is checked.
#
#     POST /batches/t --header, [group id, bytes, digest], ...--> frames (`frame_transfer`) --> checked --> one frame
#                                                                     | not what was announced
#                                           POST /batches/t/bad-frames: the service looks itself, names and counts it;
#                                           the batch goes on without what it confirms, always the same
#
# A frame is checked here, where its bytes are anyway: length, digest, columns, log-probs. That its header answers its
# request was checked when it was pushed, and the digest says that this is that header.

POLL_S = 10.0
"""How long one long poll stays open: a wait is made of several, so that its reason is news."""
READS = 3
"""A batch whose frames the service finds sound, and we do not, is read so often."""


class Puller:
    """Batches of one buffer service, as they travel."""

    def __init__(self, peer: Peer, frames: FrameTransfer, *, now: Callable[[], float]) -> None:
        """`now`: seconds of a clock that only rises, by which a wait is measured."""
        self._peer, self._frames, self._now = peer, frames, now

    def frame(self, step: int, *, timeout_s: float, on_wait: Callable[[str], None] | None = None) -> bytes:
        """The batch of `step`. Arguments and errors as in `bapo.transport.buffer_client.BufferClient.batch`."""
        moved = self._now()
        reason, counts = "no answer yet", None
        while (left := moved + timeout_s - self._now()) > 0:
            wait_s = min(POLL_S, left)
            query, retry_s = {"wait_s": f"{wait_s:.3f}"}, min(self._peer.retry_s, left)
            answer = self._peer.call("POST", f"/batches/{step}", query=query, wait_s=wait_s, retry_s=retry_s)
            if answer.status == 200:
                return self._read(step, answer.body)
            waiting = answer.json()
            reason, found = waiting["reason"], waiting.get("counts")
            if counts is not None and found != counts:
                moved = self._now()
            counts = found
            if on_wait is not None:
                on_wait(reason)
        raise DeadlineError(f"batch {step} did not come, and nothing moved for {timeout_s:.0f} s: {reason}")

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
        raise UnavailableError(f"the frames of batch {step} came damaged {READS} times, and are sound in the buffer")

    def _confirmed(self, step: int, suspects: list[str]) -> dict[str, str]:
        """Group id -> what is wrong with its frame, by the service's own look."""
        answer = self._peer.call("POST", f"/batches/{step}/bad-frames", body={"group_ids": suspects})
        bad = dict(answer.json()["bad"])
        for group_id, problem in bad.items():
            log.warning("batch %d goes on without group %s: its frame is bad (%s)", step, group_id, problem)
        return bad


# What a claim calls itself, so that the buffer knows it again when it is repeated.
#
# claim --answered--> the next claim of the worker has a number above it
#   +----unheard----> the next claim of the worker is this one once more: it gets the leases that nobody heard of


class ClaimNonces:
    """The nonces of one client, "<random>-<number>". Thread-safe, because each step is one operation of a dict."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        """As a client that nobody has heard of."""
        self._client, self._pid = secrets.token_hex(8), os.getpid()
        self._numbers = itertools.count(1)
        self._newest: dict[str, str] = {}
        """Worker -> nonce of its newest claim."""
        self._unheard: dict[str, str] = {}
        """The same, of those that failed or were cancelled."""

    @contextmanager
    def claiming(self, worker_id: str) -> Iterator[str]:
        """The nonce of one claim; the claim counts as unheard when the block is left by an exception."""
        if self._pid != os.getpid():  # a forked one must not repeat the claims of its parent
            self._begin()
        nonce = self._unheard.pop(worker_id, None) or f"{self._client}-{next(self._numbers)}"
        self._newest[worker_id] = nonce
        try:
            yield nonce
        except BaseException:
            # One that another claim of the worker has overtaken would get nothing any more.
            if self._newest[worker_id] == nonce:
                self._unheard[worker_id] = nonce
            raise
