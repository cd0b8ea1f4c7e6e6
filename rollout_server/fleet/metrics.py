"""Metrics of the fleet, from the reports of its workers; totals include dead workers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from bapo.runtime.metrics.registry import BY_NAME
from bapo.runtime.metrics.rollout_server import OUTCOMES
from bapo.runtime.metrics.server import Telemetry
from rollout_server.worker_report import MILLION, WorkerReport


class FleetMetrics:
    """Names and meanings are in `bapo.runtime.metrics.rollout_server`. Thread-safe."""

    def __init__(self, telemetry: Telemetry, task: str) -> None:
        """`task`: label of the grading metrics."""
        self.restarts = telemetry.counter("bapo_rollout_worker_restarts_total")
        self._groups = telemetry.counter("bapo_rollout_groups_total")
        self._tokens = telemetry.counter("bapo_rollout_tokens_total")
        self._truncated = telemetry.counter("bapo_rollout_truncated_total")
        self._verdicts = telemetry.counter("bapo_verifier_results_total")
        for outcome in OUTCOMES:  # so that the first error is an increase from 0
            self._verdicts.labels(task=task, outcome=outcome)
        self._telemetry = telemetry
        self._inflight = telemetry.gauge("bapo_rollout_inflight_groups")
        self._version = telemetry.gauge("bapo_rollout_policy_version")
        self._up = telemetry.gauge("bapo_rollout_worker_up")
        self._memory = telemetry.gauge("bapo_rollout_worker_memory_bytes")
        self._rate = telemetry.gauge("bapo_rollout_worker_tokens_per_second")
        self._engine = telemetry.gauge("bapo_rollout_engine_responses")
        self._cache = telemetry.gauge("bapo_rollout_engine_kv_cache_ratio")
        self._workers = telemetry.gauge("bapo_rollout_workers")
        self._sync_s = telemetry.histogram("bapo_sync_duration_seconds")
        self._sync_bytes = telemetry.counter("bapo_sync_bytes_total")
        self._sync_failures = telemetry.counter("bapo_sync_failures_total")
        self._undecided = telemetry.counter("bapo_sync_undecided_total")
        self._episodes = telemetry.gauge("bapo_episodes")
        self._oldest_s = telemetry.gauge("bapo_episode_oldest_seconds")
        self._events = telemetry.counter("bapo_episode_events_total")
        self._failures = telemetry.counter("bapo_episode_failures_total")
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._counts: dict[str, Mapping[str, int]] = {}
        self._states: dict[str, str] = {}

    def observe(self, slot: str, state: str, report: WorkerReport) -> None:
        """Add the report of the worker in `slot`; the counts of a new worker start at zero."""
        with self._lock:
            self._states[slot] = state
            self._show_states()
        self.count(slot, report.counts)
        self._inflight.labels(worker=slot).set(report.inflight)
        self._version.labels(worker=slot).set(report.policy_version)
        self._up.labels(worker=slot).set(state == "ready")
        self._memory.labels(worker=slot).set(report.rss_bytes)
        self._rate.labels(worker=slot).set(report.tokens_per_s)
        self._engine.labels(worker=slot, state="running").set(report.running)
        self._engine.labels(worker=slot, state="waiting").set(report.waiting)
        self._cache.labels(worker=slot).set(report.kv_cache_usage)

    def count(self, slot: str, counts: Mapping[str, int]) -> None:
        """Add what has been counted since the last time. `counts`: of `WorkerReport`."""
        with self._lock:
            before, self._counts[slot] = self._counts.get(slot, {}), counts
        if any(counts.get(key, 0) < count for key, count in before.items()):
            before = {}  # counts only increase: this is a new worker
        for key, count in counts.items():
            self._add(key, count - before.get(key, 0))

    def agents(self, *, num_open: int, num_waiting: int, oldest_s: float) -> None:
        """Show the episodes of agents. `oldest_s`: since the oldest open one was opened."""
        self._episodes.labels(state="open").set(num_open)
        self._episodes.labels(state="waiting").set(num_waiting)
        self._oldest_s.set(oldest_s)

    def forget(self, slot: str) -> None:
        """Remove the series of a slot that has ended."""
        with self._lock:
            self._counts.pop(slot, None)
            self._states.pop(slot, None)
            self._show_states()
        for gauge in (self._inflight, self._version, self._up, self._memory, self._rate, self._cache):
            gauge.remove(slot)
        for state in ("running", "waiting"):
            self._engine.remove(slot, state)

    def updated(self, seconds: float, *, num_bytes: int, num_failed: int) -> None:
        """Add one update of all workers. `num_bytes`: loaded by all of them."""
        self._sync_bytes.inc(num_bytes)
        self._sync_s.labels(phase="fleet").observe(seconds)
        self._sync_failures.inc(num_failed)

    def total(self, key: str) -> int:
        """Sum over all workers, dead ones included, of a key of `WorkerReport.counts`."""
        return self._totals[key]

    def _add(self, key: str, count: int) -> None:
        with self._lock:
            self._totals[key] += count
        kind, _, rest = key.partition("/")
        if kind == "groups":
            purpose, _, outcome = rest.partition("/")
            self._groups.labels(purpose=purpose, outcome=outcome).inc(count)
        elif kind == "tokens":
            self._tokens.labels(purpose=rest).inc(count)
        elif kind == "truncated":
            self._truncated.labels(purpose=rest).inc(count)
        elif kind == "undecided":
            self._undecided.labels(check=rest).inc(count)
        elif kind == "verdict":
            outcome, _, task = rest.partition("/")
            self._verdicts.labels(task=task, outcome=outcome).inc(count)
        elif kind == "episodes":
            event, _, reason = rest.partition("/")
            if reason:
                self._failures.labels(reason=reason).inc(count)
            else:
                self._events.labels(event=event).inc(count)
        elif kind in ("seen", "sum"):
            self._add_seen(kind, rest, count)

    def _add_seen(self, kind: str, rest: str, count: int) -> None:
        """Observations of one bucket, or the sum of observations."""
        metric, _, rest = rest.partition("/")
        bucket, _, label = rest.partition("/") if kind == "seen" else ("", "", rest)
        counts = [0] * (len(BY_NAME[metric].buckets) + 1)
        if kind == "seen":
            counts[int(bucket)] = count
        self._telemetry.totals(metric).add([label], counts, 0.0 if kind == "seen" else count / MILLION)

    def _show_states(self) -> None:
        numbers = Counter(self._states.values())
        for state in ("starting", "ready", "draining", "dead"):
            self._workers.labels(state=state).set(numbers[state])
