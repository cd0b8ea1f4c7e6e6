"""The scheduler's loop: poll the learner's progress, enqueue missing requests, sleep.

Its only state is the last round it issued: cursor and rounds are in the buffer, so it may crash and restart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from bapo.algorithms.composer import Composer
from bapo.config.advice import lower
from bapo.config.tree import Config
from bapo.core.types import Purpose
from bapo.runtime.metrics.server import Telemetry
from bapo.transport.buffer_client import BufferClient, BufferStatus
from bapo.transport.messages import ExtraRound
from services.scheduler.plan import FreshPlan, due_round, first_call, missed_rounds, reevaluation_requests
from services.scheduler.proposals import Proposals
from services.stalls import Watchdog, blocked_on, mark_of

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Maximum wait for the learner's next step: meanwhile groups may be dropped and need re-sampling."""


class Scheduler:
    def __init__(
        self,
        config: Config,
        plan: FreshPlan,
        composer: Composer,
        buffer: BufferClient,
        telemetry: Telemetry,
        *,
        proposals: Proposals | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`proposals`: those of the plan, if any."""
        self._proposals, self._cursor = proposals, 0
        self._config = config
        self._plan = plan
        self._composer = composer
        self._buffer = buffer
        self._asked = telemetry.counter("bapo_scheduler_requests_total")
        self._stalled_s = telemetry.gauge("bapo_stalled_seconds")
        self._rounds = RoundClock(telemetry, now)
        self._watchdog = Watchdog(config.supervision, now=now)
        self._issued_round = 0
        self._asked_extra: frozenset[ExtraRound] = frozenset()

    def run(self) -> None:
        """Run until the learner reports step T + 1.

        Raises: UnavailableError if the buffer stays unavailable; DeadlineError if a stall is configured to end the
            run.
        """
        looked_at: int | None = None
        while True:
            step = self._buffer.progress(seen_step=looked_at, wait_s=POLL_S).step
            if step > self._config.run.num_steps:
                log.info("finished: the learner has completed step %d", self._config.run.num_steps)
                return
            if looked_at is not None and step < looked_at:
                self._asked_extra = frozenset()
                self._issued_round = 0  # the learner resumed from a checkpoint: rounds may have to be issued again
            self.poll(step)
            looked_at = step

    def poll(self, step: int) -> None:
        """Enqueue everything that is due while the learner is in `step`."""
        # Re-evaluations first: a step may wait for its round, but not for the last fresh request.
        self._reevaluate(step)
        status = self._buffer.status()
        if self._issued_round and self._issued_round not in status.reevaluation_rounds:
            # The buffer keeps the newest round: Redis restarted without its last second of writes, or from a snapshot.
            log.warning("step %d: round %d is missing in the buffer, issuing it again", step, self._issued_round)
            self._issued_round = 0
            self._reevaluate(step)
        self._watch(status)
        self._rounds.poll(status)
        if self._proposals is not None and status.cursor < self._cursor:
            self._proposals.forget()  # the buffer was restored to an older state
        self._request_extra(status)
        self._request_fresh(replace(status, step=step))

    def _request_fresh(self, status: BufferStatus) -> None:
        while requests := first_call(self._plan.due(status)):
            cursor = status.cursor + len(requests)
            spares = status.fresh_spares + min(len(requests), self._plan.num_spares(status))
            self._buffer.enqueue(requests, cursor=cursor, spares=spares)
            self._asked.labels(purpose=Purpose.FRESH.value).inc(len(requests))
            log.debug("step %d: requested %d fresh groups, cursor=%d", status.step, len(requests), cursor)
            status = replace(status, cursor=cursor, fresh_spares=spares)
        self._cursor = status.cursor

    def _request_extra(self, status: BufferStatus) -> None:
        """Enqueue extra rounds. Repeated while none is open, because the buffer may have been reset; known ids have no
        effect."""
        if not status.num_open(Purpose.FRESH):
            self._asked_extra = frozenset()
        for extra in status.extra_rounds:
            if extra in self._asked_extra:
                continue
            added = self._buffer.enqueue(self._plan.extra_requests(extra))
            self._asked.labels(purpose=Purpose.FRESH.value).inc(added)
            log.info("step %d: %s; requested %d more fresh groups", extra.step, status.demand, added)
        self._asked_extra = frozenset(status.extra_rounds)

    def _watch(self, status: BufferStatus) -> None:
        config = self._config
        sentence = self._watchdog.poll(
            mark_of(status),
            lambda: blocked_on(status, self._composer.fresh_schedule.at(status.step), config.run.num_steps),
        )
        if sentence:
            log.warning("%s", sentence)
        self._stalled_s.set(self._watchdog.stalled_s)

    def _reevaluate(self, step: int) -> None:
        due = due_round(step, self._config)
        if due is None or due <= self._issued_round:
            return
        rounds = self._buffer.status().reevaluation_rounds
        if due in rounds:  # issued by an earlier scheduler, or before the learner went back to a checkpoint
            log.info("step %d: its re-evaluation was requested before, %d requests are open", due, rounds[due])
            self._issued_round = due
            return
        hard = self._buffer.hard_prompts()
        if hard and (missed := missed_rounds(due, {*rounds, self._issued_round}, self._config)):
            steps = f"step {missed[0]}" if len(missed) == 1 else f"steps {missed[0]} to {missed[-1]}"
            log.warning("step %d: no re-evaluation at %s: the learner passed before the scheduler saw it", due, steps)
        requests = reevaluation_requests(due, hard, composer=self._composer, plan=self._plan, config=self._config)
        if len(requests) > len(asked := first_call(requests)):
            log.warning(
                "step %d: only %d of %d hard prompts are re-evaluated, more exceed the size of one call: %s", due,
                len(asked), len(requests),
                " or ".join([*filter(None, [lower(self._config, "algorithm.max_reevaluated")]), "remove long columns"]),
            )  # fmt: skip
            requests = list(asked)
        # Also without requests: a step that waits for its round must know that it is empty.
        self._buffer.reevaluate(due, requests)
        self._issued_round = due
        self._rounds.issued(due, len(requests))
        self._asked.labels(purpose=Purpose.REEVALUATE.value).inc(len(requests))
        log.info("step %d: re-evaluating %d of %d hard prompts", due, len(requests), len(hard))


class RoundClock:
    """Measures the duration of rounds issued by this process, and the lag of all rounds."""

    def __init__(self, telemetry: Telemetry, now: Callable[[], float]) -> None:
        self._issued = telemetry.counter("bapo_reevaluation_rounds_total")
        self._seconds = telemetry.histogram("bapo_reevaluation_duration_seconds")
        self._lag = telemetry.gauge("bapo_reevaluation_lag_steps")
        self._now = now
        self._began: dict[int, float] = {}

    def issued(self, step: int, num_requests: int) -> None:
        self._issued.labels(outcome="asked" if num_requests else "empty").inc()
        if num_requests:
            self._began[step] = self._now()

    def poll(self, status: BufferStatus) -> None:
        """Update the metrics. A round that the buffer no longer lists was assembled."""
        is_open = [step for step, left in status.reevaluation_rounds.items() if left]
        for step in [step for step in self._began if step not in is_open]:
            self._seconds.observe(self._now() - self._began.pop(step))
        self._lag.set(max(0, status.step - min(is_open)) if is_open else 0)
