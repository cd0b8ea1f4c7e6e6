"""Talk to the buffer service: one method per use case, the same error classes on both sides of the wire.

Every call may be repeated without harm, so every call is: until `retry_s` has passed, while the service restarts or
its Redis is away. Synchronous and thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from bapo.errors import ContractError, DeadlineError, UnavailableError
from bapo.messages import (
    BufferStatus,
    WorkerLeases,
    hard_prompt_from_map,
    request_from_map,
    request_map,
    status_from_map,
)
from bapo.peer import Answer, Peer
from bapo.types import Batch, Group, HardPrompt, Progress, Prompt, RolloutRequest
from bapo.wire import split_frames, unpack_batch, unpack_group

__all__ = ["BufferClient", "BufferStatus", "WorkerLeases"]

POLL_S = 10.0
"""How long one long poll stays open: a wait is made of several, so that its reason is news."""
MOST_PUSH_BYTES = 32 << 20
"""More frames than this travel in several calls."""
SNAPSHOT_WAIT_S = 300.0
READY_PAUSE_S = 0.1


class BufferClient:
    """The buffer service of one run."""

    def __init__(self, url: str, *, timeout_s: float = 30.0, retry_s: float = 60.0) -> None:
        """
        Args:
            url: `http://host:port`.
            timeout_s: longest silence of one call.
            retry_s: how long a call goes on against a service that is down or full.
        """
        self._peer = Peer("the buffer service", url, timeout_s=timeout_s, retry_s=retry_s)
        self.url = self._peer.url

    # -- work: scheduler and workers --------------------------------------------------------------------------

    def enqueue(self, requests: Sequence[RolloutRequest], *, cursor: int | None = None) -> int:
        """Ask for groups; a request id that was asked for before is ignored.

        Args:
            cursor: fresh requests ever enqueued, these included; stored with them, only rises, and a cursor that is
                not above the stored one adds nothing (another scheduler was there first).
        Returns: how many were new.
        """
        body = {"requests": [request_map(request) for request in requests], "cursor": cursor}
        return int(self._peer.call("POST", "/requests", body=body).json()["accepted"])

    def claim(self, worker_id: str, *, limit: int, policy_version: int, wait_s: float = 0.0) -> list[RolloutRequest]:
        """Lease at most `limit` requests that weights of `policy_version` may answer.

        Args:
            wait_s: wait so long for the first one; [] when there is none after that.
        """
        body = {"worker_id": worker_id, "limit": limit, "policy_version": policy_version, "wait_s": wait_s}
        answer = self._peer.call("POST", "/requests/claim", body=body, wait_s=wait_s)
        return [request_from_map(fields) for fields in answer.json()["requests"]]

    def renew(self, worker_id: str, request_ids: Sequence[str]) -> list[str]:
        """Keep leases for another `buffer.lease_s`; returns the ids that the worker still holds."""
        body = {"worker_id": worker_id, "request_ids": list(request_ids)}
        return list(self._peer.call("POST", "/requests/renew", body=body).json()["request_ids"])

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

        Args:
            frames: from `bapo.wire.pack_group`.
        Returns: group id -> `stored`; `duplicate` (it was there already); `stale` (older weights than the request
            admits: it is asked for again); `unknown` (never asked for, or long forgotten). None needs a second push.
        Raises: ContractError when one frame is malformed or answers another request than it says; nothing is
            stored then.
        """
        fates: dict[str, str] = {}
        for body in _bodies(frames):
            fates.update(self._peer.call("POST", "/groups", body=body).json()["groups"])
        return fates

    # -- batches: learner -------------------------------------------------------------------------------------

    def batch(self, step: int, *, timeout_s: float, on_wait: Callable[[str], None] | None = None) -> Batch:
        """D_t. The same step has the same batch until a checkpoint after it is committed.

        Args:
            on_wait: is told what the batch waits for, every few seconds.
        Raises: DeadlineError with the buffer's reason after `timeout_s`; UnavailableError when too many groups in a
            row failed, or the service stays away; ContractError for a step that is not next and not retained.
        """
        deadline = time.monotonic() + timeout_s
        reason = "no answer yet"
        while (left := deadline - time.monotonic()) > 0:
            answer = self._poll_batch(step, left)
            if answer.status == 200:
                return unpack_batch(answer.body)
            reason = answer.json()["reason"]
            if on_wait is not None:
                on_wait(reason)
        raise DeadlineError(f"batch {step} did not come within {timeout_s:.0f} s: {reason}")

    def _poll_batch(self, step: int, left_s: float) -> Answer:
        wait_s = min(POLL_S, left_s)
        retry_s = min(self._peer.retry_s, left_s)
        query = {"wait_s": f"{wait_s:.3f}"}
        return self._peer.call("POST", f"/batches/{step}", query=query, wait_s=wait_s, retry_s=retry_s)

    def commit(self, step: int, *, checkpointed: int) -> None:
        """Batch `step` is trained. Batches up to the durable checkpoint `checkpointed` are released."""
        self._peer.call("POST", f"/batches/{step}/commit", body={"checkpointed": checkpointed})

    def progress(self) -> Progress:
        """The newest report; Progress(step=0, policy_version=0) before the first."""
        fields = self._peer.call("GET", "/progress").json()
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

    def collect(self, label: str) -> list[Group]:
        """All groups of one evaluation that are done, in the order of their ids."""
        body = self._peer.call("GET", f"/evaluations/{label}").body
        return [unpack_group(frame) for frame in split_frames(body)]

    def forget(self, label: str) -> None:
        """Delete the groups and open requests of one evaluation."""
        self._peer.call("DELETE", f"/evaluations/{label}")

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

        Raises: ContractError when the buffer does not hold all batches after `step`: restore the checkpoint's
            snapshot first.
        """
        self._peer.call("POST", "/resume", body={"step": step})

    def wait_ready(self, timeout_s: float) -> None:
        """Return when the service and its Redis answer. Raises: DeadlineError with the last reason."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._peer.call("GET", "/readyz", retry_s=0.0)
            except UnavailableError as error:
                if time.monotonic() > deadline:
                    raise DeadlineError(f"the buffer was not ready within {timeout_s:.0f} s: {error}") from error
                time.sleep(READY_PAUSE_S)
            else:
                return


def _bodies(frames: Sequence[bytes]) -> Iterator[bytes]:
    """Frames joined into bodies of at most MOST_PUSH_BYTES, at least one frame each."""
    if not frames:
        return
    body: list[bytes] = []
    size = 0
    for frame in frames:
        if not frame:
            raise ContractError("a frame is empty")
        if body and size + len(frame) > MOST_PUSH_BYTES:
            yield b"".join(body)
            body, size = [], 0
        body.append(frame)
        size += len(frame)
    yield b"".join(body)
