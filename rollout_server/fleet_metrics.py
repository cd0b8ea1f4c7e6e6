"""The fleet's metrics, made from what its workers report: totals that survive the workers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from bapo.telemetry import Telemetry
from rollout_server.report import WorkerReport


class FleetMetrics:
    """Names and meanings are in `bapo.metrics.rollout_server`. Thread-safe."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.restarts = telemetry.counter("bapo_rollout_worker_restarts_total")
        self._groups = telemetry.counter("bapo_rollout_groups_total")
        self._tokens = telemetry.counter("bapo_rollout_tokens_total")
        self._failures = telemetry.counter("bapo_verifier_failures_total")
        self._inflight = telemetry.gauge("bapo_rollout_inflight_groups")
        self._version = telemetry.gauge("bapo_rollout_policy_version")
        self._workers = telemetry.gauge("bapo_rollout_workers")
        self._sync_s = telemetry.histogram("bapo_sync_duration_seconds")
        self._sync_failures = telemetry.counter("bapo_sync_failures_total")
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._counts: dict[str, Mapping[str, int]] = {}
        self._states: dict[str, str] = {}

    def observe(self, place: str, state: str, report: WorkerReport) -> None:
        """A worker of `place` has reported; its counts start again at zero when it was replaced."""
        with self._lock:
            before, self._counts[place] = self._counts.get(place, {}), report.counts
            self._states[place] = state
            self._show_states()
        for key, count in report.counts.items():
            old = before.get(key, 0)
            self._add(key, count - old if count >= old else count)
        self._inflight.labels(worker=place).set(report.inflight)
        self._version.labels(worker=place).set(report.policy_version)

    def forget(self, place: str) -> None:
        """A place has ended."""
        with self._lock:
            self._counts.pop(place, None)
            self._states.pop(place, None)
            self._show_states()
        for gauge in (self._inflight, self._version):
            gauge.remove(place)

    def updated(self, seconds: float, *, num_failed: int) -> None:
        """One update of all workers."""
        self._sync_s.labels(phase="fleet").observe(seconds)
        self._sync_failures.inc(num_failed)

    def total(self, key: str) -> int:
        """What all workers, also those that are gone, have counted under this key of `WorkerReport.counts`."""
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
        elif rest.startswith("verifier"):
            self._failures.labels(reason=rest).inc(count)

    def _show_states(self) -> None:
        numbers = Counter(self._states.values())
        for state in ("starting", "ready", "draining", "dead"):
            self._workers.labels(state=state).set(numbers[state])
