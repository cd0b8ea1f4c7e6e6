"""The buffer's metrics: counted when something happens, or read from the status when they are scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from bapo.config.tree import Config
from bapo.errors import Refusal
from bapo.messages import BufferStatus
from bapo.telemetry import Telemetry
from buffer_service.assembly import origin_counts
from buffer_service.values import Assembly


class BufferMetrics:
    """Names of `bapo.metrics.buffer_service` and nothing else."""

    def __init__(self, telemetry: Telemetry, config: Config) -> None:
        self._telemetry = telemetry
        telemetry.gauge("bapo_batch_capacity_groups").set(config.algorithm.batch_size)
        self._seconds = telemetry.histogram("bapo_buffer_operation_seconds")
        # What every push counts is looked up once: finding a label takes longer than counting.
        self._ingested: dict[str, Any] = {}
        self._operations: dict[str, Any] = {}

    def groups_pushed(self, fates: Sequence[str]) -> None:
        """One word of `PushFate` each."""
        for fate in set(fates):
            if fate not in self._ingested:
                counter = self._telemetry.counter("bapo_buffer_ingested_groups_total")
                self._ingested[fate] = counter.labels(fate=fate)
            self._ingested[fate].inc(fates.count(fate))

    def group_failed(self, reason: str) -> None:
        """A worker reported a group without rewards."""
        self._telemetry.counter("bapo_buffer_failed_groups_total").labels(reason=reason).inc()

    def refused(self, reason: Refusal) -> None:
        """A request was answered with 4xx: nothing of it was stored."""
        self._telemetry.counter("bapo_refused_requests_total").labels(reason=reason.value).inc()

    def redis_failed(self) -> None:
        """A call to Redis failed."""
        self._telemetry.counter("bapo_buffer_redis_errors_total").inc()

    def took(self, operation: str, seconds: float) -> None:
        """Time of one API operation."""
        if operation not in self._operations:
            self._operations[operation] = self._seconds.labels(operation=operation)
        self._operations[operation].observe(seconds)

    def assembled(self, assembly: Assembly) -> None:
        """A batch came into being in this process."""
        for origin, number in origin_counts(assembly).items():
            self._telemetry.gauge("bapo_batch_groups").labels(origin=origin.value).set(number)
            self._telemetry.counter("bapo_batch_trained_groups_total").labels(origin=origin.value).inc(number)
        fates = assembly.batch.header["fates"]
        answers = Counter(fate["reason"] for fate in fates if fate["purpose"] == "reevaluate")
        for reason, number in answers.items():
            self._telemetry.counter("bapo_reevaluation_prompts_total").labels(outcome=reason).inc(number)
        filtered = (fate for fate in fates if fate["purpose"] != "reevaluate" and fate["origin"] is None)
        for reason, number in Counter(fate["reason"] for fate in filtered).items():
            self._telemetry.counter("bapo_batch_filtered_groups_total").labels(reason=reason).inc(number)

    def exposition(self, status: BufferStatus) -> bytes:
        """What `/metrics` answers."""
        tables = {
            "fresh": status.fresh_ready,
            "reevaluated": status.reevaluated_ready,
            "bad": status.num_bad,
            "high": status.num_high,
        }
        for table, number in tables.items():
            self._telemetry.gauge("bapo_buffer_groups").labels(table=table).set(number)
        for state, by_purpose in (("queued", status.queued), ("leased", status.leased)):
            for purpose, number in by_purpose.items():
                self._telemetry.gauge("bapo_buffer_requests").labels(purpose=purpose, state=state).set(number)
        self._telemetry.gauge("bapo_buffer_bytes").set(status.num_bytes)
        if status.r_tot is not None:
            self._telemetry.gauge("bapo_reward_global_mean_ratio").set(status.r_tot)
        for name, value in (("c2", status.c2), ("c3", status.c3)):
            if value is not None:
                self._telemetry.gauge("bapo_threshold_ratio").labels(name=name).set(value)
        return self._telemetry.exposition()
