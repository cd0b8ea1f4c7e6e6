"""From a rollout to the buffer's acknowledgement: grade, pack, push.

    add --> [grading threads: rewards, frame]             --> [pushing threads: all waiting frames] --push--> buffer
                       |                                                   next: bapo/transport/buffer_client.py
                       +-- the verifier failed --> reported as failed, never pushed with reward 0

A push without an acknowledgement is dropped: its requests are re-sampled when their leases expire. A rejected group is
reported as failed, and re-sampled a limited number of times.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from bapo.core.codec import pack_group
from bapo.core.errors import BapoError, ContractError, GradingError, UnavailableError
from bapo.core.reward_details import limited
from bapo.core.types import Purpose, RolloutRequest, Timing, num_correct
from bapo.tasks.grading.pool import GraderPool, Grades
from bapo.transport.buffer_client import BufferClient
from rollout_server.leases import Lease, Leases
from rollout_server.rollouts.base import Rollout
from rollout_server.worker_report import WorkerCounts

log = logging.getLogger(__name__)

Frames = queue.SimpleQueue[tuple[str, bytes] | None]

NUM_GRADERS = 2
"""Two, so that one hung verifier does not block the other groups for `task.grading_timeout_s`."""
MAX_FRAMES = 64
"""Frames per push."""
LINGER_S = 0.1
"""How long a push waits for further groups: each call costs the engine's thread a millisecond."""


def outcome_counts(grades: Grades) -> dict[str, int]:
    """Number of responses with reward 1 (correct), 0 (wrong, or busy: not graded to the end), and between (partial)."""
    rewards = grades.rewards
    correct, zero = num_correct(rewards.tolist()), int((rewards <= 0.0).sum())
    busy = min(zero, grades.num_busy)  # another of several rewards may give a response some credit
    return {"correct": correct, "wrong": zero - busy, "busy": busy, "partial": len(rewards) - correct - zero}


class Delivery:
    """Grades and pushes in its own threads until `stop`."""

    def __init__(
        self,
        *,
        worker_id: str,
        buffer: BufferClient,
        grader: GraderPool,
        leases: Leases,
        counts: WorkerCounts,
        num_graders: int,
        on_death: Callable[[BaseException], None],
        on_end: Callable[[str], None],
    ) -> None:
        """
        Args:
            on_death: called with an error that ends one of the threads.
            on_end: called with the id of each group that the buffer has, or that failed.
        """
        self._on_end = on_end
        self._worker_id = worker_id
        self._buffer = buffer
        self._grader = grader
        self._leases = leases
        self._counts = counts
        self._pending: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Pending gradings and failure reports."""
        # Two queues: pushes of fresh groups wait while the buffer is full, the others must not.
        self._queues: dict[bool, Frames] = {is_fresh: queue.SimpleQueue() for is_fresh in (False, True)}
        self._graders = [guarded_thread(f"grade-{i}", self._grade_all, on_death) for i in range(num_graders)]
        self._pushers = [
            guarded_thread(f"push-{i}", partial(self._push_all, q), on_death) for i, q in self._queues.items()
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in (*self._graders, *self._pushers):
            thread.start()

    def add(self, rollout: Rollout, lease: Lease) -> None:
        """Deliver a rollout that has just ended."""
        self._pending.put(partial(self._grade, rollout, lease, time.monotonic() - lease.began))

    def ungraded_async(self, request: RolloutRequest, error: GradingError) -> None:
        """Report a request whose responses have no rewards, in a grading thread."""
        self._pending.put(partial(self._ungraded, request, error))

    def refuse_async(self, request_id: str, reason: str, detail: str) -> None:
        """`refuse` in a grading thread: does not block while the buffer is down."""
        self._pending.put(partial(self.refuse, request_id, reason, detail))

    def refuse(self, request_id: str, reason: str, detail: str) -> None:
        """Report a request as failed; it is re-sampled, by any worker, a limited number of times."""
        lease = self._leases.remove(request_id)
        if lease is None:
            return
        self._on_end(request_id)
        self._counts.add(f"failed/{reason}")
        self._counts.add(f"groups/{lease.request.purpose.value}/failed")
        log.warning("group %s failed reason=%s: %s", request_id, reason, detail)
        try:
            self._buffer.fail(self._worker_id, request_id, reason=reason, detail=detail)
        except UnavailableError as error:
            log.warning("group %s: could not report the failure, its lease will expire: %s", request_id, error)

    def stop(self, timeout_s: float) -> None:
        """Stop grading, push what is graded, and join the threads until the timeout."""
        deadline = time.monotonic() + timeout_s
        for _ in self._graders:
            self._pending.put(None)
        for thread in self._graders:
            _join(thread, deadline)
        for frames in self._queues.values():
            frames.put(None)
        for thread in self._pushers:
            _join(thread, deadline)

    def _grade_all(self) -> None:
        while (work := self._pending.get()) is not None:
            work()

    def _grade(self, rollout: Rollout, lease: Lease, sample_s: float) -> None:
        request, sequences = rollout.request, rollout.sequences
        if not all(np.isfinite(sequence.rollout_logprobs).all() for sequence in sequences):
            self.refuse(request.request_id, "not_finite", "the engine returned non-finite log-probs")
            return
        purpose, task = request.purpose.value, request.prompt.task
        lengths = [len(sequence.token_ids) for sequence in sequences if not sequence.is_expert]
        self._counts.observe("bapo_rollout_group_seconds", purpose, [sample_s])
        self._counts.observe("bapo_rollout_response_tokens", purpose, lengths)
        self._counts.add(f"truncated/{purpose}", sum(sequence.truncated for sequence in sequences))
        began = time.monotonic()
        try:
            grades = self._grades(rollout)
        except GradingError as error:
            self._ungraded(request, error)
            return
        grade_s = time.monotonic() - began
        self._counts.observe("bapo_verifier_seconds", task, [grade_s])
        for outcome, number in outcome_counts(grades).items():
            self._counts.add(f"verdict/{outcome}/{task}", number)
        timing = Timing(claimed_at=lease.claimed_at, sample_s=sample_s, grade_s=grade_s)
        try:
            group = rollout.group(grades.rewards, worker_id=self._worker_id, timing=timing, details=grades.details)
        except ContractError as error:
            # Counts as an attempt: if the worker failed instead, it would claim the same group again.
            self.refuse(request.request_id, "no_group", f"the engine returned an invalid group: {error}")
            return
        log.debug("group %s mu=%.3f tokens=%d", group.group_id, group.mu, len(group.token_ids))
        self._queues[group.purpose is Purpose.FRESH].put((group.group_id, pack_group(group)))

    def _grades(self, rollout: Rollout) -> Grades:
        """The rewards that responses have already, and those of the verifier. Raises: GradingError."""
        rewards = np.full(len(rollout.sequences), np.nan) if rollout.rewards is None else np.array(rollout.rewards)
        ungraded = np.flatnonzero(np.isnan(rewards))
        if not len(ungraded):
            return Grades(rewards=rewards.astype(np.float32), details=limited(rollout.facts))
        texts = [rollout.sequences[row].text or "" for row in ungraded]
        found = self._grader.grade(rollout.request.prompt, texts)
        rewards[ungraded] = found.rewards
        nothing = np.full(len(rewards), np.nan, np.float32)
        details = {name: rollout.facts.get(name, nothing).copy() for name in (*found.details, *rollout.facts)}
        for name, values in found.details.items():
            details[name][ungraded] = values
        return Grades(rewards=rewards.astype(np.float32), details=limited(details), num_busy=found.num_busy)

    def _ungraded(self, request: RolloutRequest, error: GradingError) -> None:
        reason = getattr(error, "reason", "error")
        self._counts.add(f"verdict/{reason.removeprefix('verifier_')}/{request.prompt.task}", request.group_size)
        self.refuse(request.request_id, getattr(error, "reason", "grading"), str(error))

    def _push_all(self, frames: Frames) -> None:
        while (first := frames.get()) is not None:
            items, ended = self._gather(frames, first)
            self._push(dict(items))
            if ended:
                return

    def _gather(self, frames: Frames, first: tuple[str, bytes]) -> tuple[list[tuple[str, bytes]], bool]:
        """`first` and the frames that arrive within `LINGER_S`; whether the queue has ended."""
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
            results = self._buffer.push(list(frames.values()))
        except UnavailableError as error:
            self._counts.add("groups/all/unacknowledged", len(frames))
            log.warning(
                "%d groups were not acknowledged and will be re-sampled: %s",
                len(frames),
                error,
            )
            results = {}
        except ContractError as error:
            self._push_apart(frames, error)
            return
        for group_id in frames:
            lease = self._leases.remove(group_id)
            result = results.get(group_id)
            if result is not None:
                self._on_end(group_id)
            if lease is not None and result is not None:
                self._counts.add(f"groups/{lease.request.purpose.value}/{result}")

    def _push_apart(self, frames: Mapping[str, bytes], error: ContractError) -> None:
        """Push one by one: rejected groups are reported as failed, the others are stored."""
        if len(frames) > 1:
            for group_id, frame in frames.items():
                self._push({group_id: frame})
            return
        for group_id in frames:
            self.refuse(group_id, "refused", f"the buffer rejected the group: {error}")


def _join(thread: threading.Thread, deadline: float) -> None:
    if thread.ident is not None:
        thread.join(max(0.0, deadline - time.monotonic()))


def guarded_thread(name: str, run: Callable[[], None], on_death: Callable[[BaseException], None]) -> threading.Thread:
    """An unstarted daemon thread that calls `on_death` with what `run` raises."""

    def guarded() -> None:
        try:
            run()
        except BapoError as error:  # expected: its message needs no traceback
            on_death(error)
        except Exception as error:  # a bug in a thread must fail the worker
            log.exception("%s ended", name)
            on_death(error)

    return threading.Thread(target=guarded, name=name, daemon=True)
