"""Metrics of the buffer service: counted on events, or read from the status at a scrape."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import Gauge

from bapo.algorithms.composer import Reason
from bapo.algorithms.composers.registry import load_composer
from bapo.config.tree import Config
from bapo.core.codec import result_from_map
from bapo.core.errors import Refusal
from bapo.core.types import Origin, Purpose, are_equal, num_sampled, sampled_rewards
from bapo.runtime.metrics.server import Telemetry
from bapo.transport.messages import BufferStatus
from buffer_service.assembly import origin_counts
from buffer_service.state import Assembly, Memory, left_high

READ_FROM_REDIS = ("bapo_buffer_groups", "bapo_buffer_requests", "bapo_batch_groups")
NUMBERS_FROM_REDIS = (
    "bapo_buffer_bytes",
    "bapo_buffer_redis_persistent",
    "bapo_buffer_redis_memory_bytes",
    "bapo_run_committed_steps",
)
"""Metrics read from Redis that have no labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """The values a scrape reads from the store."""

    status: BufferStatus
    memory: Memory
    persistent: bool
    """Acknowledged writes survive a crash of the store's process."""


class BufferMetrics:
    """Updates the metrics declared in `bapo.runtime.metrics.buffer_service`."""

    def __init__(self, telemetry: Telemetry, config: Config) -> None:
        self._telemetry = telemetry
        self._algorithm = config.algorithm
        self._num_steps = config.run.num_steps
        self._show_run(config)
        self._seconds = telemetry.histogram("bapo_buffer_operation_seconds")
        ages = telemetry.histogram("bapo_buffer_age_steps")
        self._ages = {table: ages.labels(table=table) for table in ("bad", "high")}
        # Labels of the push path are resolved once: a lookup takes longer than an increment.
        self._ingested: dict[str, Any] = {}
        self._operations: dict[str, Any] = {}

    def groups_pushed(self, results: Sequence[str]) -> None:
        """Count push results (values of `PushResult`)."""
        for result in set(results):
            if result not in self._ingested:
                counter = self._telemetry.counter("bapo_buffer_ingested_groups_total")
                self._ingested[result] = counter.labels(result=result)
            self._ingested[result].inc(results.count(result))

    def group_failed(self, reason: str) -> None:
        """Count a group that failed at a worker, or whose frame is corrupt."""
        self._telemetry.counter("bapo_buffer_failed_groups_total").labels(reason=reason).inc()

    def refused(self, reason: Refusal) -> None:
        """Count a request that was rejected with 4xx; nothing of it was stored."""
        self._telemetry.counter("bapo_refused_requests_total").labels(reason=reason.value).inc()

    def redis_failed(self) -> None:
        """Count a failed call to Redis."""
        self._telemetry.counter("bapo_buffer_redis_errors_total").inc()

    def took(self, operation: str, seconds: float) -> None:
        """Record the latency of one API operation."""
        if operation not in self._operations:
            self._operations[operation] = self._seconds.labels(operation=operation)
        self._operations[operation].observe(seconds)

    def assembled(self, assembly: Assembly) -> None:
        """Count a batch that this process assembled."""
        for origin, number in origin_counts(assembly).items():
            self._count("bapo_batch_trained_groups_total", number, origin=origin.value)
        results = assembly.batch.header["results"]
        answers = Counter(result["reason"] for result in results if result["purpose"] == "reevaluate")
        for reason, number in answers.items():
            self._count("bapo_reevaluation_prompts_total", number, outcome=reason)
        filtered = (result for result in results if result["purpose"] != "reevaluate" and result["origin"] is None)
        for reason, number in Counter(result["reason"] for result in filtered).items():
            self._count("bapo_batch_filtered_groups_total", number, reason=reason)
        for rewards, number in fresh_by_rewards(assembly).items():
            self._count("bapo_batch_fresh_groups_total", number, rewards=rewards)
        for table, number in inserted(assembly).items():
            self._count("bapo_buffer_inserted_total", number, table=table)
        for (table, reason), number in evicted(assembly, high_window=self._algorithm.high_window).items():
            self._count("bapo_buffer_evicted_total", number, table=table, reason=reason)
        for table, age in ages(assembly):
            self._ages[table].observe(age)
        for (purpose, use), (responses, tokens) in spent(assembly).items():
            self._count("bapo_ledger_responses_total", responses, purpose=purpose, use=use)
            self._count("bapo_ledger_tokens_total", tokens, purpose=purpose, use=use)

    def exposition(self, scrape: Scrape | None) -> bytes:
        """The response of `/metrics`. `scrape`: None if Redis does not respond."""
        self._gauge("bapo_buffer_redis_up").set(scrape is not None)
        if scrape is None:
            # Do not export stale values while Redis is unavailable.
            for name in READ_FROM_REDIS:
                self._gauge(name).clear()
            for name in NUMBERS_FROM_REDIS:
                self._gauge(name).set(math.nan)
            return self._telemetry.exposition()
        self._show_redis(scrape)
        self._show_tables(scrape.status)
        if scrape.status.batches:
            self._show_batch(scrape.status.batches[-1])
        else:  # there may be none any more: a run can be dropped
            self._gauge("bapo_batch_groups").clear()
            self._gauge("bapo_batch_fill_ratio").set(math.nan)
        return self._telemetry.exposition()

    def _show_redis(self, scrape: Scrape) -> None:
        self._gauge("bapo_buffer_redis_persistent").set(scrape.persistent)
        self._gauge("bapo_buffer_redis_memory_bytes").set(scrape.memory.used)
        self._gauge("bapo_buffer_redis_memory_limit_bytes").set(scrape.memory.limit or math.nan)

    def _show_tables(self, status: BufferStatus) -> None:
        tables = {
            "fresh": status.fresh_ready,
            "reevaluated": status.reevaluated_ready,
            "bad": status.num_bad,
            "high": status.num_high,
        }
        for table, number in tables.items():
            self._gauge("bapo_buffer_groups").labels(table=table).set(number)
        for state, by_purpose in (("queued", status.queued), ("leased", status.leased)):
            for purpose, number in by_purpose.items():
                self._gauge("bapo_buffer_requests").labels(purpose=purpose, state=state).set(number)
        self._gauge("bapo_buffer_bytes").set(status.num_bytes)
        self._gauge("bapo_run_committed_steps").set(status.committed_step)
        target = status.committed_step if status.has_ended(self._num_steps) else self._num_steps
        self._gauge("bapo_run_target_steps").set(target)
        self._gauge("bapo_reward_global_mean_ratio").set(math.nan if status.r_tot is None else status.r_tot)
        thresholds, decide = {"c1": self._algorithm.c1, **status.facts}, load_composer(self._algorithm).decides_by
        for name in ("c1", "c2", "c3"):
            value = thresholds.get(name, math.nan) if name in decide else math.nan
            self._gauge("bapo_threshold_ratio").labels(name=name).set(value)

    def _show_batch(self, line: Mapping[str, Any]) -> None:
        """Set the gauges of the newest batch, whichever instance assembled it."""
        for origin in Origin:
            self._gauge("bapo_batch_groups").labels(origin=origin.value).set(line[origin.value])
        filled = sum(line[origin.value] for origin in Origin)
        self._gauge("bapo_batch_fill_ratio").set(filled / line["batch_size"])

    def _show_run(self, config: Config) -> None:
        """Set the gauges that are constant for the run."""
        self._gauge("bapo_run_info").labels(
            preset=config.preset or "",
            algorithm=config.algorithm.composer,
            model=config.model.path,
            task=config.task.name,
            engine=config.rollout.engine,
        ).set(1)
        cadence = config.cadence
        for name, steps in (
            ("v", cadence.weight_sync_interval),
            ("m", cadence.reevaluation_interval),
            ("max_staleness", cadence.max_staleness),
        ):
            self._gauge("bapo_cadence_steps").labels(name=name).set(steps)
        self._gauge("bapo_batch_capacity_groups").set(config.algorithm.batch_size)
        for table, limit in (("bad", config.algorithm.capacity), ("fresh", config.buffer.max_fresh_groups)):
            if limit is not None:
                self._gauge("bapo_buffer_capacity_groups").labels(table=table).set(limit)

    def _gauge(self, name: str) -> Gauge:
        return self._telemetry.gauge(name)

    def _count(self, name: str, number: int, **labels: str) -> None:
        self._telemetry.counter(name).labels(**labels).inc(number)


# Counts of one assembly: entries into and out of B_bad and B_high, and the outcome of the groups that it read.
#
# Pure functions of an Assembly. Groups are counted at the first assembly that reads them, so X3 costs nothing.

Spent = dict[tuple[str, str], tuple[int, int]]
"""(purpose, use) -> (responses, tokens)."""


def inserted(assembly: Assembly) -> dict[str, int]:
    """Table -> entries added by this step, including those that replace an older entry of the same prompt."""
    before, after = assembly.before, assembly.after
    had_bad = {(entry.prompt_id, entry.birth) for entry in before.bad}
    had_high = {stat.group_id for stat in before.high}
    return {
        "bad": sum((entry.prompt_id, entry.birth) not in had_bad for entry in after.bad),
        "high": sum(stat.group_id not in had_high for stat in after.high),
    }


def evicted(assembly: Assembly, *, high_window: int) -> Counter[tuple[str, str]]:
    """(table, reason) -> entries that left the table, including those replaced by a newer entry of the same prompt.

    `inserted` minus `evicted` is the growth of the table.

    Args:
        high_window: S, the steps that a group stays in B_high.
    """
    before, after = assembly.before, assembly.after
    answers = {
        result["prompt_id"]: result["reason"] for result in _inspected(assembly) if result["purpose"] == "reevaluate"
    }
    found: Counter[tuple[str, str]] = Counter()
    stay = {(entry.prompt_id, entry.birth) for entry in after.bad}
    hard = {entry.prompt_id for entry in after.bad}
    for entry in before.bad:
        if (entry.prompt_id, entry.birth) not in stay:
            reason = answers.get(entry.prompt_id)
            is_answered = reason in (Reason.IMPROVED, Reason.SOLVED)
            found["bad", str(reason) if is_answered else "replaced" if entry.prompt_id in hard else "full"] += 1
    left = set(left_high(before, after))
    newer = {stat.prompt_id for stat in after.high}
    for stat in before.high:
        if stat.group_id in left:
            expired = stat.birth <= assembly.step - high_window
            found["high", "expired" if expired else "replaced" if stat.prompt_id in newer else "dropped"] += 1
    return found


def ages(assembly: Assembly) -> Iterator[tuple[str, int]]:
    """(table, steps since insertion) of every entry that was used: re-evaluated, or trained as X3."""
    births = {entry.prompt_id: entry.birth for entry in assembly.before.bad}
    high = {stat.group_id: stat.birth for stat in assembly.before.high}
    for result in assembly.batch.header["results"]:
        if result["origin"] == "x3" and result["group_id"] in high:
            yield "high", assembly.step - high[result["group_id"]]
        elif result["purpose"] == "reevaluate" and result["prompt_id"] in births:
            yield "bad", assembly.step - births[result["prompt_id"]]


def spent(assembly: Assembly) -> Spent:
    """Responses and tokens of the groups that this assembly was the first to read."""
    found: Spent = {}
    trained = {result["group_id"] for result in assembly.batch.header["results"] if result["origin"] is not None}
    for result in _inspected(assembly):
        use = (
            "stale" if result["reason"] == Reason.STALE else "trained" if result["group_id"] in trained else "left_out"
        )
        responses, tokens = found.get((result["purpose"], use), (0, 0))
        num = num_sampled(result_from_map(result))
        found[result["purpose"], use] = responses + num, tokens + result["num_tokens"]
    return found


def fresh_by_rewards(assembly: Assembly) -> Counter[str]:
    """Whether their rewards `differ` or are `equal` -> fresh groups that this assembly was the first to read."""
    fresh = (result_from_map(result) for result in _inspected(assembly) if result["purpose"] == Purpose.FRESH)
    return Counter("equal" if are_equal(sampled_rewards(result)) else "differ" for result in fresh)


def _inspected(assembly: Assembly) -> Iterator[Mapping[str, Any]]:
    """Results of groups that no earlier step has read, one per group."""
    new = {*assembly.fresh, *assembly.reevaluated}
    for result in assembly.batch.header["results"]:
        if result["group_id"] in new or result["reason"] == Reason.STALE:
            new.discard(result["group_id"])
            yield result
