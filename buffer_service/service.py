"""Use cases of the buffer: pushes and batches. Routes call the store and inspection directly for anything simpler.

Stateless: all state is in the store, so that any number of instances may serve one run. All methods block and are
called from worker threads.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from bapo.algorithms.composer import Composer
from bapo.config.tree import Config
from bapo.core.batch_items import BAD_FRAME
from bapo.core.call_limits import MAX_GROUPS, in_parts_by_size
from bapo.core.codec import PulledFrame, frame_problem, pack_pull, unpack_push
from bapo.core.errors import ContractError, FrameError, FullError, NotRetriedError, UnavailableError
from bapo.core.types import Purpose, RolloutRequest
from bapo.runtime.logs import RateLimitedFilter
from buffer_service.assembly import Assembler, Wait, is_ready, readiness_text, retained_text
from buffer_service.backpressure import Backpressure, Shortfall
from buffer_service.ingest import Ingest
from buffer_service.inspection import Inspection, Maintenance
from buffer_service.metrics import BufferMetrics, Scrape
from buffer_service.prompt_texts import PromptTexts
from buffer_service.snapshot import unpack_snapshot
from buffer_service.state import Assembly, BatchRecord, GroupRecord, PushResult
from buffer_service.store.redis.store import RedisStore

log = logging.getLogger(__name__)

FORGOTTEN = "; if Redis has lost steps (power loss, or no append-only file), resume the run from its latest checkpoint"
MAX_ASSEMBLY_READS = 20
"""An assembly that finds stale groups or loses a race reads again up to this many times before it waits."""

MAX_UNCOUNTED = 16
"""Maximum number of assemblies whose metrics are not counted yet."""
AHEAD_S = 10.0
"""How long a worker that claimed with unpublished weights is reported."""


FRAMES_BYTES = 4 << 20
"""Bytes of frames that are read and sent at a time."""
Frames = Iterator[list[bytes]]


class BufferService:
    """The buffer of one run."""

    def __init__(
        self,
        store: RedisStore,
        composer: Composer,
        config: Config,
        metrics: BufferMetrics,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self._config, self._metrics = store, config, metrics
        self._assembler = Assembler(store, composer, config)
        self._ingest = Ingest(store)
        self._now, self._limiter = now, RateLimitedFilter()
        self._ahead = (float("-inf"), "")
        """Time and message of the last claim with unpublished weights."""
        self._reasons = FailureReasons(store)
        self._uncounted: deque[Assembly] = deque()
        """Assemblies to count once the learner has its batch, or at the next scrape."""
        self.inspection = Inspection(store, config.cadence.max_staleness)
        self.shortfall = Shortfall()
        self.backpressure = Backpressure(store, config, wanted=self._assembler.wanted)
        self._texts = PromptTexts(store.fresh_requests)
        self.maintenance = Maintenance(store, config, on_drop=self._texts.forget)

    # -- requests

    def enqueue(self, requests: Sequence[RolloutRequest], cursor: int | None, spares: int | None = None) -> int:
        """See `bapo.transport.buffer_client.BufferClient` for this and the following methods.

        Raises: ContractError for a re-evaluation of a step whose round was already issued, or for an id that stands for
            another prompt.
        """
        again = [request for request in requests if request.purpose == "reevaluate"]
        rounds = self.store.status().reevaluation_rounds if again else {}
        for request in again:
            if request.step in rounds:
                raise ContractError(
                    f"request {request.request_id} is a re-evaluation of step {request.step}, whose round was already "
                    f"issued: send the whole round with POST /reevaluations/{request.step}"
                )
        self._texts.require_same(requests)
        return self.store.enqueue(requests, cursor=cursor, spares=spares)

    def enqueue_round(self, step: int, requests: Sequence[RolloutRequest]) -> int:
        """Issue the re-evaluation round of a step once: later calls change nothing, whichever prompts they have.

        Raises: ContractError for other requests, as for `enqueue`.
        """
        for request in requests:
            if request.purpose != "reevaluate" or request.step != step:
                raise ContractError(f"request {request.request_id} is not a re-evaluation of step {step}")
        # Before ids are compared: a scheduler that plans the round again may do so from another B_bad.
        if self.store.readiness(step).round_left is not None:
            return 0
        self._texts.require_same(requests)
        return self.store.enqueue_round(step, requests)

    def claim(self, worker_id: str, limit: int, policy_version: int, nonce: str = "") -> list[RolloutRequest]:
        """Lease requests; no new fresh ones while the buffer is full.

        Returns nothing for a policy version that was undone by a restore or by lost writes in Redis: its groups would
        be rejected, each as a failed attempt, until the learner publishes to the worker again.
        """
        if ahead := self._ingest.ahead(policy_version):
            self._ahead = (self._now(), f"no requests for {worker_id}: it samples with {ahead}")
            if self._limiter.is_due("ahead"):
                log.warning("%s", self._ahead[1])
            return []
        self.backpressure.poll()
        with_fresh = not self.backpressure.full_reason()
        return self.store.claim(
            worker_id, limit=limit, policy_version=policy_version, with_fresh=with_fresh, nonce=nonce
        )

    def fail(self, worker_id: str, request_id: str, reason: str, detail: str) -> str:
        """Record a failed group: `requeued`, `dropped` or `not_leased`. Raises: ContractError for an invalid reason."""
        word = self._reasons.bounded(reason)
        if word != reason:
            detail = f"{reason}: {detail}"
        outcome = self.store.fail(worker_id, request_id, reason=word, detail=detail)
        if outcome != "not_leased":
            self._reasons.counted(word)
            self._metrics.group_failed(word)
            log.warning(
                "group %s failed worker=%s reason=%s outcome=%s: %s", request_id, worker_id, word, outcome, detail
            )
        return outcome

    def release(self, worker_id: str) -> int:
        """Return all leases of a dead worker to the queue."""
        released = self.store.release(worker_id)
        log.info("worker %s released leases=%d", worker_id, released)
        return released

    # -- groups

    def push(self, body: bytes) -> dict[str, str]:
        """Store the groups whose headers are in `body` (`bapo.core.codec.pack_push`) and whose frames are in Redis.

        Returns: group id -> result.
        Raises: FullError while fresh groups are rejected; ContractError, and nothing is stored, if a group is
            malformed, does not match its request, differs from the stored group of its lease, or has no frame of the
            declared length.
        """
        groups = self._ingest.checked(unpack_push(body))
        records = [group.record for group in groups]
        if fresh_bytes := sum(record.num_bytes for record in records if record.purpose is Purpose.FRESH):
            self.backpressure.poll()
            self.backpressure.admit(fresh_bytes)
        try:
            results = self.store.push(groups)
        except FullError:
            self.backpressure.forget()  # so that the next push is rejected before it writes its frames
            raise
        except FrameError as error:
            log.warning("push rejected: %s", error)
            raise
        self._metrics.groups_pushed(results)
        stored = [r for r, result in zip(records, results, strict=True) if result == PushResult.STORED]
        num_fresh = sum(record.purpose is Purpose.FRESH for record in stored)
        self.shortfall.took(num_fresh)
        self.backpressure.took(num_fresh)
        if log.isEnabledFor(logging.DEBUG):
            _log_results(records, results)
        return {record.group_id: result for record, result in zip(records, results, strict=True)}

    def held(self, group_ids: Sequence[str]) -> Frames:
        """Frames of those groups that are stored, in chunks. Corrupt ones are skipped, logged and counted."""
        stored = filter(None, self.store.records(group_ids))
        for records in in_parts_by_size(stored, MAX_GROUPS, FRAMES_BYTES, lambda record: record.num_bytes):
            frames = self.store.frames([record.group_id for record in records])
            sound = [f for r, f in zip(records, frames, strict=True) if f is not None and not self._problem(r, f)]
            yield sound

    def _problem(self, record: GroupRecord, frame: bytes | None) -> str:
        """The problem of a group's frame, as one word; logged with its worker the first time."""
        problem = frame_problem(frame, record.num_bytes, record.digest)
        if problem and self.store.note_bad_frame(record, problem):
            self._metrics.group_failed(BAD_FRAME)
            log.warning("group %s of worker %s has a corrupt frame (%s)", record.group_id, record.worker_id, problem)
        return problem

    # -- batches

    def batch(self, step: int) -> BatchRecord | None:
        """The batch of a step, assembled now if possible; None if groups are missing.

        Raises: ContractError for a step that is neither next nor retained; NotRetriedError after
            `buffer.max_failures_in_a_row` groups that failed.
        """
        for _ in range(MAX_ASSEMBLY_READS):
            stored, reading = self.shortfall.stored, self._assembler.read_step(step)
            ready = reading.ready
            if step <= ready.assembled:
                return self._retained(step)
            if step > ready.assembled + 1:
                raise ContractError(f"batch {step} requested, but the next step is {ready.assembled + 1}{FORGOTTEN}")
            wanted = self._assembler.wanted(step)
            if not is_ready(step, ready, self._config, wanted):
                self.shortfall.found(step, wanted - ready.num_fresh, stored)
                if ready.failures_in_a_row >= self._config.buffer.max_failures_in_a_row:
                    raise NotRetriedError(
                        f"{ready.failures_in_a_row} groups in a row failed while the learner waits for batch {step} "
                        f"(buffer.max_failures_in_a_row={self._config.buffer.max_failures_in_a_row}); "
                        f"the last one: {ready.last_failure}"
                    )
                return None
            assembly = self._assembler.assemble(reading)
            if isinstance(assembly, Wait):
                return None
            if assembly is not None:
                self._uncounted.append(assembly)
                if len(self._uncounted) > MAX_UNCOUNTED:
                    self._count_assemblies()
                self.backpressure.forget()
                return assembly.batch
        return None

    def waiting_for(self, step: int) -> tuple[str, tuple[int, ...]]:
        """What the next batch is waiting for, and `BufferStatus.counts`, which show whether there is progress."""
        ready, status, wanted = self.store.readiness(step), self.store.status(), self._assembler.wanted(step)
        reason = readiness_text(step, ready, status, self._config, wanted)
        self.backpressure.poll()
        ahead_at, ahead = self._ahead
        if self._now() - ahead_at < AHEAD_S:
            reason += f"; {ahead}"
        full = self.backpressure.shortage_reason()
        if full:
            reason += f"; {full}: it may reject missing groups, raise that limit{retained_text(status, self._config)}"
        return reason, status.counts

    def pulled(self, record: BatchRecord) -> bytes:
        """Pack a batch for the learner, which reads the frames itself. Raises: UnavailableError if it was released
        meanwhile."""
        records = [found for found in self.store.records(record.group_ids) if found is not None]
        if len(records) != len(record.group_ids):
            raise UnavailableError(f"batch {record.step} was released while it was being read: retry")
        return pack_pull(record.header, [PulledFrame(r.group_id, r.num_bytes, r.digest) for r in records])

    def bad_frames(self, step: int, group_ids: Sequence[str]) -> dict[str, str]:
        """Re-read frames of a retained batch: group id -> problem of the corrupt ones, which are counted by worker and
        removed from B_high."""
        suspects = set(group_ids) & set(self._retained(step).group_ids)
        bad: dict[str, str] = {}
        for record in filter(None, self.store.records(sorted(suspects))):
            if problem := self._problem(record, self.store.frames([record.group_id])[0]):
                bad[record.group_id] = problem
        self.maintenance.leave_high(bad)
        return bad

    def untrained(self, step: int) -> Frames:
        """Frames of the groups that the assembly of a step did not train, as far as they are retained.

        Raises: ContractError if the batch of the step is not assembled yet, or no longer retained."""
        if step > (assembled := self.store.readiness(step).assembled):
            raise ContractError(f"step {step} is not assembled yet: the newest batch is {assembled}")
        return self.held(self._retained(step).untrained)

    def commit(self, step: int, checkpointed: int) -> bool:
        """Mark batch `step` as trained; whether a checkpoint is due. Raises: ContractError for an unknown step."""
        assembled = self.store.readiness(step).assembled
        if step > assembled or checkpointed > step:
            raise ContractError(
                f"cannot commit step {step} with checkpoint {checkpointed}: the newest batch is {assembled}{FORGOTTEN}"
            )
        self.store.commit(step, checkpointed)
        self._count_assemblies()
        return self.backpressure.wants_checkpoint()

    def _count_assemblies(self) -> None:
        while self._uncounted:
            try:
                assembly = self._uncounted.popleft()
            except IndexError:  # another thread has taken the last one
                return
            self._metrics.assembled(assembly)

    def _retained(self, step: int) -> BatchRecord:
        record = self.store.batch(step)
        if record is None:
            status = self.store.status()
            raise ContractError(
                f"batch {step} was released at checkpoint {status.checkpointed_step}; the next step is "
                f"{status.assembled_step + 1}: resume there, or start a new run"
            )
        return record

    # -- state

    def exposition(self, scrape: Scrape | None) -> bytes:
        """The response of `/metrics`. `scrape`: from `Inspection.scrape`. Does not read the store."""
        self._count_assemblies()
        return self._metrics.exposition(scrape)

    def restore(self, data: bytes | bytearray) -> None:
        """Replace the state of the run. Raises: ContractError for a damaged snapshot; nothing changes then."""
        image, frames = unpack_snapshot(memoryview(data))
        self.store.restore(image, frames)
        self._ingest.forget()
        self._texts.forget()
        self.shortfall.forget()
        log.info("restored assembled=%d groups=%d", image.tables.step, len(image.references))

    def resume(self, step: int) -> None:
        """Resume after checkpoint `step`."""
        self.store.resume(step)
        log.info("resumed after step %d", step)


def _log_results(records: Sequence[GroupRecord], results: Sequence[str]) -> None:
    for record, result in zip(records, results, strict=True):
        log.debug("group %s prompt=%s purpose=%s version=%d tokens=%d worker=%s result=%s", record.group_id,
                  record.prompt_id, record.purpose, record.policy_version, record.num_tokens, record.worker_id,
                  result)  # fmt: skip


# Failure reasons: chosen by workers; a bounded number of them become metric labels.

REASON = re.compile(r"[a-z][a-z0-9_]{0,31}")
MAX_REASONS = 64
"""Each is a metric label and a counter for the whole run; BAPO's workers use about a dozen."""
OTHER = "other"
_COUNTED = "failed_groups:"


class FailureReasons:
    """The failure reasons of one run so far. Thread-safe: two new ones at once may both be accepted."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._known: frozenset[str] = frozenset()

    def bounded(self, reason: str) -> str:
        """The reason, or `other` if it is new and MAX_REASONS are in use. Raises: ContractError if it is malformed."""
        if not REASON.fullmatch(reason):
            raise ContractError(f"reason {reason!r:.200} must match [a-z][a-z0-9_]{{0,31}}")
        if reason in self._known:
            return reason
        if len(self._known) < MAX_REASONS:
            counted = (event for event in self._store.counters() if event.startswith(_COUNTED))
            found = {event.removeprefix(_COUNTED) for event in counted} - {OTHER}
            self._known |= frozenset(islice(sorted(found - self._known), MAX_REASONS - len(self._known)))
        return reason if reason in self._known or len(self._known) < MAX_REASONS else OTHER

    def counted(self, word: str) -> None:
        """Register a reason that was counted."""
        if len(self._known) < MAX_REASONS:
            self._known |= {word} - {OTHER}
