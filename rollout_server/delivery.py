"""From a sampled group to the buffer's acknowledgement: grade, pack, push.

    sampled --> [grading threads, one per child] --> frames --> [pushing threads: as many frames as wait] --> buffer
                       |
                       +-- the verifier failed --> reported as failed, never pushed with reward 0

A push that the buffer does not acknowledge is dropped here: its request is sampled again when the lease ends. A group
that it refuses is reported as failed, so that it is tried again, a limited number of times.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from bapo.core.codec import pack_group
from bapo.core.errors import BapoError, ContractError, GradingError, UnavailableError
from bapo.core.token_arrays import Float32s
from bapo.core.types import Group, Outcome, Prompt, Purpose, RolloutRequest, Timing
from rollout_server.engines.base import SampledGroup
from rollout_server.experts import Experts
from rollout_server.leases import Lease, Leases
from rollout_server.worker_report import Tally

log = logging.getLogger(__name__)

Frames = queue.SimpleQueue[tuple[str, bytes] | None]

MAX_FRAMES = 64
"""Frames of one push: bounds the size of one HTTP body."""
LINGER_S = 0.1
"""How long a push waits for more groups while more are on their way: a call costs the engine's thread a millisecond."""


class Buffer(Protocol):
    """What a worker uses of `bapo.transport.buffer_client.BufferClient`."""

    def claim(
        self, worker_id: str, *, limit: int, policy_version: int, wait_s: float = 0.0
    ) -> list[RolloutRequest]: ...

    def renew(self, worker_id: str, request_ids: Sequence[str]) -> list[str]: ...

    def fail(self, worker_id: str, request_id: str, *, reason: str, detail: str = "") -> None: ...

    def release(self, worker_id: str) -> int: ...

    def push(self, frames: Sequence[bytes]) -> dict[str, str]: ...


class Grader(Protocol):
    """What delivery uses of `GraderPool`."""

    def grade(self, prompt: Prompt, texts: Sequence[str]) -> Float32s: ...

    def expert(self, prompt: Prompt) -> str | None: ...


def make_group(
    sampled: SampledGroup, lease: Lease, rewards: Float32s, *, worker_id: str, sample_s: float, grade_s: float
) -> Group:
    """The group that the buffer stores. Raises: ContractError when its columns contradict each other."""
    request = lease.request
    outcomes = np.where(sampled.truncated, Outcome.TRUNCATED, Outcome.GRADED).astype(np.uint8)
    outcomes[len(outcomes) - sampled.num_experts :] = Outcome.EXPERT
    return Group(
        group_id=request.request_id,
        prompt=request.prompt,
        purpose=request.purpose,
        step=request.step,
        label=request.label,
        worker_id=worker_id,
        prompt_token_ids=sampled.prompt_token_ids,
        token_ids=sampled.token_ids,
        rollout_logprobs=sampled.logprobs,
        lengths=sampled.lengths,
        rewards=rewards,
        outcomes=outcomes,
        versions=sampled.versions,
        timing=Timing(claimed_at=lease.claimed_at, sample_s=sample_s, grade_s=grade_s),
        spans=sampled.spans,
    )


def verdicts(rewards: Float32s) -> dict[str, int]:
    """How many of the responses the verifier called correct (1), wrong (0), or something between."""
    correct, wrong = int((rewards >= 1.0).sum()), int((rewards <= 0.0).sum())
    return {"correct": correct, "wrong": wrong, "partial": len(rewards) - correct - wrong}


class Delivery:
    """Grades and pushes in threads of its own until `stop`. `on_death` hears of an error that ends one of them."""

    def __init__(
        self,
        *,
        worker_id: str,
        buffer: Buffer,
        grader: Grader,
        experts: Experts,
        leases: Leases,
        tally: Tally,
        num_graders: int,
        on_death: Callable[[BaseException], None],
        on_end: Callable[[str], None] = lambda request_id: None,
    ) -> None:
        """`on_end`: hears of each group that the buffer has, or that was given up."""
        self._on_end = on_end
        self._worker_id = worker_id
        self._buffer = buffer
        self._grader = grader
        self._experts = experts
        self._leases = leases
        self._tally = tally
        self._to_do: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Gradings, and refusals of the engine."""
        # Two, because pushes of fresh groups wait while the buffer is full, and the others must not.
        self._queues: dict[bool, Frames] = {is_fresh: queue.SimpleQueue() for is_fresh in (False, True)}
        self._graders = [guarded_thread(f"grade-{i}", self._grade_all, on_death) for i in range(num_graders)]
        self._pushers = [
            guarded_thread(f"push-{i}", partial(self._push_all, q), on_death) for i, q in self._queues.items()
        ]

    def start(self) -> None:
        """Begin to deliver."""
        for thread in (*self._graders, *self._pushers):
            thread.start()

    def add(self, sampled: SampledGroup, lease: Lease) -> None:
        """A group that the engine has just finished."""
        self._to_do.put(partial(self._grade, sampled, lease, time.monotonic() - lease.began))

    def refuse_soon(self, request_id: str, reason: str, detail: str) -> None:
        """As `refuse`, for a thread that must not wait for a buffer that is away."""
        self._to_do.put(partial(self.refuse, request_id, reason, detail))

    def refuse(self, request_id: str, reason: str, detail: str) -> None:
        """Report a request as failed; it is retried whole, elsewhere or later, a limited number of times."""
        lease = self._leases.remove(request_id)
        if lease is None:
            return
        self._on_end(request_id)
        self._tally.add(f"failed/{reason}")
        self._tally.add(f"groups/{lease.request.purpose.value}/failed")
        log.warning("group %s failed reason=%s: %s", request_id, reason, detail)
        try:
            self._buffer.fail(self._worker_id, request_id, reason=reason, detail=detail)
        except UnavailableError as error:
            log.warning("group %s: the failure was not reported, the lease will end by itself: %s", request_id, error)

    def stop(self, timeout_s: float) -> None:
        """Grade nothing more, push what is graded, and end the threads as far as the time allows."""
        deadline = time.monotonic() + timeout_s
        for _ in self._graders:
            self._to_do.put(None)
        for thread in self._graders:
            _join(thread, deadline)
        for frames in self._queues.values():
            frames.put(None)
        for thread in self._pushers:
            _join(thread, deadline)

    def _grade_all(self) -> None:
        while (work := self._to_do.get()) is not None:
            work()

    def _grade(self, sampled: SampledGroup, lease: Lease, sample_s: float) -> None:
        if not np.isfinite(sampled.logprobs).all():
            self.refuse(sampled.request_id, "not_finite", "the engine gave log-probs that are not finite")
            return
        purpose, task = lease.request.purpose.value, lease.request.prompt.task
        self._tally.observe("bapo_rollout_group_seconds", purpose, [sample_s])
        self._tally.observe("bapo_rollout_response_tokens", purpose, sampled.lengths.tolist())
        self._tally.add(f"truncated/{purpose}", int(sampled.truncated.sum()))
        began = time.monotonic()
        try:
            sampled = self._experts.joined(sampled, lease.request)
            rewards = self._grader.grade(lease.request.prompt, sampled.texts)
        except GradingError as error:
            outcome = getattr(error, "reason", "error").removeprefix("verifier_")
            self._tally.add(f"verdict/{outcome}/{task}", len(sampled.texts))
            self.refuse(sampled.request_id, getattr(error, "reason", "grading"), str(error))
            return
        grade_s = time.monotonic() - began
        self._tally.observe("bapo_verifier_seconds", task, [grade_s])
        for outcome, number in verdicts(rewards).items():
            self._tally.add(f"verdict/{outcome}/{task}", number)
        try:
            group = make_group(sampled, lease, rewards, worker_id=self._worker_id, sample_s=sample_s, grade_s=grade_s)
        except ContractError as error:
            # An attempt: a worker that died of it would be given the same group again, and so would the next one.
            self.refuse(sampled.request_id, "no_group", f"the engine gave what is no group: {error}")
            return
        log.debug(
            "group %s prompt=%s purpose=%s version=%d mu=%.3f tokens=%d sample_s=%.2f grade_s=%.3f",
            group.group_id,
            group.prompt.prompt_id,
            group.purpose.value,
            group.policy_version,
            group.mu,
            len(group.token_ids),
            sample_s,
            grade_s,
        )
        self._queues[group.purpose is Purpose.FRESH].put((group.group_id, pack_group(group)))

    def _push_all(self, frames: Frames) -> None:
        while (first := frames.get()) is not None:
            items, ended = self._gather(frames, first)
            self._push(dict(items))
            if ended:
                return

    def _gather(self, frames: Frames, first: tuple[str, bytes]) -> tuple[list[tuple[str, bytes]], bool]:
        """`first` and what comes within `LINGER_S`; and whether the end of the queue came."""
        items = [first]
        deadline = time.monotonic() + LINGER_S
        while len(items) < min(MAX_FRAMES, len(self._leases)):
            try:
                item = frames.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if item is None:
                return items, True
            items.append(item)
        return items, False

    def _push(self, frames: Mapping[str, bytes]) -> None:
        try:
            fates = self._buffer.push(list(frames.values()))
        except UnavailableError as error:
            self._tally.add("groups/all/unacknowledged", len(frames))
            log.warning("%d groups were not acknowledged, their leases will bring them back: %s", len(frames), error)
            fates = {}
        except ContractError as error:
            self._push_apart(frames, error)
            return
        for group_id in frames:
            lease = self._leases.remove(group_id)
            fate = fates.get(group_id)
            if fate is not None:
                self._on_end(group_id)
            if lease is not None and fate is not None:
                self._tally.add(f"groups/{lease.request.purpose.value}/{fate}")

    def _push_apart(self, frames: Mapping[str, bytes], error: ContractError) -> None:
        """Find the groups that the buffer refuses: they are reported as failed, and the others are stored."""
        if len(frames) > 1:
            for group_id, frame in frames.items():
                self._push({group_id: frame})
            return
        for group_id in frames:
            self.refuse(group_id, "refused", f"the buffer refused the group: {error}")


def _join(thread: threading.Thread, deadline: float) -> None:
    if thread.ident is not None:
        thread.join(max(0.0, deadline - time.monotonic()))


# Threads of a worker, none of which may die unseen: the fleet replaces a worker that says that it has failed.


def guarded_thread(name: str, run: Callable[[], None], on_death: Callable[[BaseException], None]) -> threading.Thread:
    """A daemon that is not started yet; `on_death` gets what `run` raises, in that thread."""

    def guarded() -> None:
        try:
            run()
        except BapoError as error:  # foreseen, and worded for whoever reads it: where it came from says nothing more
            on_death(error)
        except Exception as error:  # a thread that dies of a bug must end its worker
            log.exception("%s ended", name)
            on_death(error)

    return threading.Thread(target=guarded, name=name, daemon=True)
