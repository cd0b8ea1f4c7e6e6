"""The story of a push and of a batch. Routes call the store and inspection themselves for what needs no rule.

Stateless: everything is in the store, so that any number of instances may serve one run. All methods block and are
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
from bapo.core.errors import ContractError, FrameError, FullError, UnavailableError
from bapo.core.types import Purpose, RolloutRequest
from bapo.runtime.logs import RateLimitedFilter
from buffer_service.assembly import Assembler, Wait, is_ready, readiness_text, retained_text
from buffer_service.backpressure import Backpressure, Shortfall
from buffer_service.ingest import Ingest
from buffer_service.inspection import Inspection, Maintenance
from buffer_service.metrics import BufferMetrics, Scrape
from buffer_service.snapshot import unpack_snapshot
from buffer_service.state import Assembly, BatchRecord, GroupRecord, PushResult
from buffer_service.store.redis.store import RedisStore

log = logging.getLogger(__name__)

FORGOTTEN = "; if Redis has lost steps (power loss, or no append-only file), resume the run from its last checkpoint"
ASSEMBLY_LOOKS = 20
"""An assembly that finds stale groups, or another instance at work, reads again this many times before it waits."""

MAX_UNCOUNTED = 16
"""Assemblies that are kept until then."""
AHEAD_S = 10.0
"""How long a worker that claimed with unusable weights is named."""


FRAMES_BYTES = 4 << 20
"""Of frames that are read and sent on at once."""
Frames = Iterator[list[bytes]]


class TooManyFailuresError(UnavailableError):
    """`buffer.max_failures_in_a_row` groups failed in a row: not retried."""


class BufferService:
    """One run's buffer."""

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
        self._now, self._seldom = now, RateLimitedFilter()
        self._ahead = (float("-inf"), "")
        """When a worker with unusable weights claimed, and the message about it."""
        self._reasons = FailureReasons(store)
        self._uncounted: deque[Assembly] = deque()
        """Counted when the learner has its batch, or at the next scrape."""
        self.inspection = Inspection(store, config.cadence.max_staleness)
        self.shortfall = Shortfall()
        self.backpressure = Backpressure(store, config, wanted=self._assembler.wanted)
        self.maintenance = Maintenance(store, config)

    # -- requests

    def enqueue(self, requests: Sequence[RolloutRequest], cursor: int | None, spares: int | None = None) -> int:
        """See `bapo.transport.buffer_client.BufferClient.enqueue`, as for all that follows.

        Raises: ContractError for a re-evaluation of a step whose round was issued: the batch would wait for one more.
        """
        again = [request for request in requests if request.purpose == "reevaluate"]
        rounds = self.store.status().reevaluation_rounds if again else {}
        for request in again:
            if request.step in rounds:
                raise ContractError(
                    f"request {request.request_id} is a re-evaluation of step {request.step}, whose round was issued: "
                    f"ask for all of them by POST /reevaluations/{request.step}"
                )
        return self.store.enqueue(requests, cursor=cursor, spares=spares)

    def enqueue_round(self, step: int, requests: Sequence[RolloutRequest]) -> int:
        """Issue the re-evaluation round of a step, once. Raises: ContractError for other requests."""
        for request in requests:
            if request.purpose != "reevaluate" or request.step != step:
                raise ContractError(f"request {request.request_id} is not a re-evaluation of step {step}")
        return self.store.enqueue_round(step, requests)

    def claim(self, worker_id: str, limit: int, policy_version: int, nonce: str = "") -> list[RolloutRequest]:
        """Lease requests; no fresh ones while the buffer is full, but those that this claim has leased already.

        Nothing for weights of a future that a restore, or a Redis that has lost writes, has undone: their groups would
        be refused, and each refusal would count as a failed attempt, until the learner gives the workers older ones.
        """
        if ahead := self._ingest.ahead(policy_version):
            self._ahead = (self._now(), f"{worker_id} is given nothing: it samples with {ahead}")
            if self._seldom.is_due("ahead"):
                log.warning("%s", self._ahead[1])
            return []
        self.backpressure.poll()
        with_fresh = not self.backpressure.why_full()
        return self.store.claim(
            worker_id, limit=limit, policy_version=policy_version, with_fresh=with_fresh, nonce=nonce
        )

    def fail(self, worker_id: str, request_id: str, reason: str, detail: str) -> str:
        """A group failed: `requeued`, `dropped` or `not_leased`. Raises: ContractError for an unbounded reason."""
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
        """All leases of a dead worker return."""
        released = self.store.release(worker_id)
        log.info("worker %s released leases=%d", worker_id, released)
        return released

    # -- groups

    def push(self, body: bytes) -> dict[str, str]:
        """Store the groups whose heads `body` names (`bapo.core.codec.pack_push`), and whose frames are there;
        returns group id -> result.

        Raises: FullError while fresh groups are refused; ContractError, and nothing is stored, when one of them is
            malformed, contradicts its request, is another content of the lease whose group is held, or has no frame of
            its length.
        """
        groups = self._ingest.checked(unpack_push(body))
        records = [group.record for group in groups]
        if fresh_bytes := sum(record.num_bytes for record in records if record.purpose is Purpose.FRESH):
            self.backpressure.poll()
            self.backpressure.admit(fresh_bytes)
        try:
            results = self.store.push(groups)
        except FullError:
            self.backpressure.forget()  # the next push hears of it before it writes its frames
            raise
        except FrameError as error:
            log.warning("a push was refused: %s", error)
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
        """The frames of those groups that are held, some at a time. Bad ones are left out, named and counted."""
        stored = filter(None, self.store.records(group_ids))
        for records in in_parts_by_size(stored, MAX_GROUPS, FRAMES_BYTES, lambda record: record.num_bytes):
            frames = self.store.frames([record.group_id for record in records])
            sound = [f for r, f in zip(records, frames, strict=True) if f is not None and not self._problem(r, f)]
            yield sound

    def _problem(self, record: GroupRecord, frame: bytes | None) -> str:
        """What is wrong with the frame of a group, in one word; the first time it is named with its worker."""
        problem = frame_problem(frame, record.num_bytes, record.digest)
        if problem and self.store.note_bad_frame(record, problem):
            self._metrics.group_failed(BAD_FRAME)
            log.warning("group %s of worker %s: its frame is bad (%s)", record.group_id, record.worker_id, problem)
        return problem

    # -- batches

    def batch(self, step: int) -> BatchRecord | None:
        """The batch of a step, assembled now if nothing is missing; None when something is.

        Raises: ContractError for a step that is neither next nor retained; TooManyFailuresError.
        """
        for _ in range(ASSEMBLY_LOOKS):
            stored, reading = self.shortfall.stored, self._assembler.read_step(step)
            ready = reading.ready
            if step <= ready.assembled:
                return self._retained(step)
            if step > ready.assembled + 1:
                raise ContractError(f"batch {step} is asked for, but the next step is {ready.assembled + 1}{FORGOTTEN}")
            wanted = self._assembler.wanted(step)
            if not is_ready(step, ready, self._config, wanted):
                self.shortfall.found(step, wanted - ready.num_fresh, stored)
                if ready.failures_in_a_row >= self._config.buffer.max_failures_in_a_row:
                    raise TooManyFailuresError(
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
        """What the batch of the next step waits for, and `BufferStatus.counts`, which tell whether anything moves."""
        ready, status, wanted = self.store.readiness(step), self.store.status(), self._assembler.wanted(step)
        reason = readiness_text(step, ready, status, self._config, wanted)
        self.backpressure.poll()
        ahead_at, ahead = self._ahead
        if self._now() - ahead_at < AHEAD_S:
            reason += f"; {ahead}"
        full = self.backpressure.starved_text()
        if full:
            reason += f"; {full}: it may refuse what is missing, raise that limit{retained_text(status, self._config)}"
        return reason, status.counts

    def pulled(self, record: BatchRecord) -> bytes:
        """A batch on its way to the learner, which reads its frames itself. Raises: UnavailableError when it is
        released meanwhile."""
        records = [found for found in self.store.records(record.group_ids) if found is not None]
        if len(records) != len(record.group_ids):
            raise UnavailableError(f"batch {record.step} was released while it was read: try again")
        return pack_pull(record.header, [PulledFrame(r.group_id, r.num_bytes, r.digest) for r in records])

    def bad_frames(self, step: int, group_ids: Sequence[str]) -> dict[str, str]:
        """Those of the groups of a retained batch whose frames, read again, are not what their headers say: group id ->
        what is wrong. They are counted with their workers, and leave B_high."""
        suspects = set(group_ids) & set(self._retained(step).group_ids)
        bad: dict[str, str] = {}
        for record in filter(None, self.store.records(sorted(suspects))):
            if problem := self._problem(record, self.store.frames([record.group_id])[0]):
                bad[record.group_id] = problem
        self.maintenance.leave_high(bad)
        return bad

    def untrained(self, step: int) -> Frames:
        """Groups that the assembly of a step did not train, as far as they are held. Raises: ContractError when the
        batch of the step is not assembled yet, or not retained."""
        if step > (assembled := self.store.readiness(step).assembled):
            raise ContractError(f"nothing is known of step {step} yet: the newest batch is {assembled}")
        return self.held(self._retained(step).untrained)

    def commit(self, step: int, checkpointed: int) -> bool:
        """Batch `step` is trained; whether a checkpoint is wanted. Raises: ContractError for a step without a batch."""
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
                f"{status.assembled_step + 1}: continue there, or start another run"
            )
        return record

    # -- state

    def exposition(self, scrape: Scrape | None) -> bytes:
        """What `/metrics` answers. `scrape`: from `Inspection.scrape`. Does not ask the store."""
        self._count_assemblies()
        return self._metrics.exposition(scrape)

    def restore(self, data: bytes | bytearray) -> None:
        """Replace everything of the run. Raises: ContractError for a damaged snapshot; nothing changes then."""
        image, frames = unpack_snapshot(memoryview(data))
        self.store.restore(image, frames)
        self._ingest.forget()
        self.shortfall.forget()
        log.info("restored assembled=%d groups=%d", image.tables.step, len(image.references))

    def resume(self, step: int) -> None:
        """A learner resumes after checkpoint `step`."""
        self.store.resume(step)
        log.info("resumed after step %d", step)


def _log_results(records: Sequence[GroupRecord], results: Sequence[str]) -> None:
    for record, result in zip(records, results, strict=True):
        log.debug("group %s prompt=%s purpose=%s version=%d tokens=%d worker=%s result=%s", record.group_id,
                  record.prompt_id, record.purpose, record.policy_version, record.num_tokens, record.worker_id,
                  result)  # fmt: skip


# Reasons of failed groups: workers choose the words, and a bounded number of them becomes metric labels.

REASON = re.compile(r"[a-z][a-z0-9_]{0,31}")
MAX_REASONS = 64
"""Each is a label of a metric and a counter for the whole run; those of our own workers are a dozen."""
OTHER = "other"
_COUNTED = "failed_groups:"


class FailureReasons:
    """The reasons that one run has had so far. Thread-safe: two new ones at once may both be taken."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._known: frozenset[str] = frozenset()

    def bounded(self, reason: str) -> str:
        """The reason, or `other` when it is a new one and there are MAX_REASONS. Raises: ContractError for no word."""
        if not REASON.fullmatch(reason):
            raise ContractError(f"reason {reason!r:.200} must be one lower-case word of at most 32 characters")
        if reason in self._known:
            return reason
        if len(self._known) < MAX_REASONS:
            counted = (event for event in self._store.counters() if event.startswith(_COUNTED))
            found = {event.removeprefix(_COUNTED) for event in counted} - {OTHER}
            self._known |= frozenset(islice(sorted(found - self._known), MAX_REASONS - len(self._known)))
        return reason if reason in self._known or len(self._known) < MAX_REASONS else OTHER

    def counted(self, word: str) -> None:
        """Remember a reason that was counted."""
        if len(self._known) < MAX_REASONS:
            self._known |= {word} - {OTHER}
