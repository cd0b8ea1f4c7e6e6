"""The metrics of one process, and a small HTTP server for them.

A process creates one `Telemetry` and gets its metrics from it by name. Only metrics registered for the process
(`bapo.runtime.metrics`) exist, and all of them exist from the start.
"""

from __future__ import annotations

import logging
import math
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.process_collector import ProcessCollector

import bapo
from bapo.core.addresses import authority, to_bind
from bapo.core.errors import ConfigError
from bapo.runtime import build_info
from bapo.runtime.auth.api_tokens import TOKEN_FILE, Keyring, Role, keyring_for, listen_host
from bapo.runtime.metrics.metric import Metric, Process
from bapo.runtime.metrics.registry import BY_NAME, metrics_of

log = logging.getLogger(__name__)
disable_created_metrics()  # type: ignore[no-untyped-call]

LOOPBACK = "127.0.0.1"
HEALTH_TIMEOUT_S = 10.0
"""Idle timeout of a connection to a health server, which uses a thread per connection."""
MAX_CALLERS = 64
"""Maximum concurrent connections to a health server; further ones are closed."""
LONGEST_CALL_S = 30.0
"""Maximum duration of a request, from its first byte to the end of the response."""


class BucketTotals:
    """A histogram that receives counts per bucket from other processes. Thread-safe."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def add(self, labels: Sequence[str], counts: Sequence[int], total: float) -> None:
        """Add observations.

        Args:
            labels: values, in registry order.
            counts: observations per bucket; the last one is above all bounds.
            total: sum of the observations.
        """
        with self._lock:
            before = self._counts.get(tuple(labels), [0] * (len(self._metric.buckets) + 1))
            self._counts[tuple(labels)] = [a + b for a, b in zip(before, counts, strict=True)]
            self._sums[tuple(labels)] = self._sums.get(tuple(labels), 0.0) + total

    def collect(self) -> Iterator[Family]:
        metric = self._metric
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.label_names)
        bounds = [*map(str, metric.buckets), "+Inf"]
        with self._lock:
            for labels, counts in self._counts.items():
                family.add_metric(labels, list(zip(bounds, accumulate(counts), strict=True)), self._sums[labels])
        yield family


class Telemetry:
    """The metrics of one process, in a separate registry."""

    def __init__(self, process: Process | None = None, *, run: str = "") -> None:
        """
        Args:
            process: the process; None: any registered metric, created on first use.
            run: value of the label `run` of every series; "": no such label.
        """
        self.registry = CollectorRegistry()
        self._run = run
        self._allowed = BY_NAME if process is None else {metric.name: metric for metric in metrics_of(process)}
        self._made: dict[str, Counter | Gauge | Histogram | BucketTotals] = {}
        self._lock = threading.Lock()
        if process is not None:
            ProcessCollector(registry=self.registry)
            for name in self._allowed:
                self._get(name)
            commit = build_info.commit() or build_info.UNKNOWN
            self.gauge("bapo_build_info").labels(version=bapo.__version__, commit=commit).set(1)

    def counter(self, name: str) -> Counter:
        """The counter of this name. Raises: KeyError if it is not registered for this process."""
        made = self._get(name)
        assert isinstance(made, Counter), name
        return made

    def gauge(self, name: str) -> Gauge:
        made = self._get(name)
        assert isinstance(made, Gauge), name
        return made

    def histogram(self, name: str) -> Histogram:
        made = self._get(name)
        assert isinstance(made, Histogram), name
        return made

    def totals(self, name: str) -> BucketTotals:
        """The histogram of this name, which is `added_up`."""
        made = self._get(name)
        assert isinstance(made, BucketTotals), name
        return made

    def exposition(self) -> bytes:
        """The response of `/metrics` (text format)."""
        return generate_latest(self)

    def collect(self) -> Iterator[Family]:
        for family in self.registry.collect():
            if self._run:
                family.samples = [
                    sample._replace(labels={"run": self._run, **sample.labels}) for sample in family.samples
                ]
            yield family

    def _get(self, name: str) -> Counter | Gauge | Histogram | BucketTotals:
        with self._lock:
            if name not in self._made:
                self._made[name] = self._make(self._allowed[name])
            return self._made[name]

    def _make(self, metric: Metric) -> Counter | Gauge | Histogram | BucketTotals:
        name, text, labels = metric.name, metric.help, metric.label_names
        if metric.added_up:
            totals = BucketTotals(metric)
            self.registry.register(totals)
            return totals
        if metric.kind == "gauge":
            gauge = Gauge(name, text, labels, registry=self.registry)
            if not labels:
                gauge.set(math.nan)  # unknown, not 0
            return gauge
        made: Counter | Histogram
        if metric.kind == "counter":
            made = Counter(name, text, labels, registry=self.registry)
        else:
            made = Histogram(name, text, labels, registry=self.registry, buckets=metric.buckets)
        if labels:
            for values in product(*(label.values for label in metric.labels)):
                made.labels(*values)
        return made


def show_disk(telemetry: Telemetry, path: Path) -> None:
    """Disk usage of a run directory, read at each scrape."""
    telemetry.gauge("bapo_run_disk_free_bytes").set_function(lambda: _disk(path).free)
    telemetry.gauge("bapo_run_disk_size_bytes").set_function(lambda: _disk(path).total)


class _Disk(NamedTuple):
    total: float
    free: float


def _disk(path: Path) -> _Disk:
    try:
        found = shutil.disk_usage(path)
    except OSError:
        return _Disk(math.nan, math.nan)  # an unavailable disk must not fail the other metrics
    return _Disk(found.total, found.free)


class HealthServer(ThreadingHTTPServer):
    """Serves up to MAX_CALLERS, each for up to LONGEST_CALL_S, so that callers cannot exhaust the threads of a learner.

    Callers that disconnect early are not logged: probes and scrapes have their own timeouts.
    """

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._since: dict[socket.socket, float] = {}
        self.address_family, bound = to_bind(*address)
        super().__init__(bound, handler)

    def verify_request(self, request: Any, client_address: object) -> bool:
        """Whether another connection is allowed."""
        return len(self._since) < MAX_CALLERS

    def process_request(self, request: Any, client_address: Any) -> None:
        self._since[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Release a connection."""
        self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Between connections, and twice per second: shut down those that take too long."""
        overdue = time.monotonic() - LONGEST_CALL_S
        for request in [request for request, since in list(self._since.items()) if since < overdue]:
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log the error of a request instead of printing it to stderr."""
        error = sys.exception()
        if isinstance(error, ConnectionError | TimeoutError):
            log.debug("%s disconnected: %s", client_address, error)
        else:
            log.error("request for health or metrics from %s failed", client_address, exc_info=error)


def serve_health(
    telemetry: Telemetry, port: int, is_ready: Callable[[], bool], host: str | None = None, tokens: str = "auto"
) -> int:
    """Serve /healthz, /readyz and /metrics from a daemon thread; returns the port (useful for port 0).

    For processes without their own API (learner, scheduler, evaluator). They listen on the loopback, unless BAPO_HOST
    is set (in containers); /metrics then requires a token.
    Args:
        tokens: `security.tokens`.
    Raises: ConfigError if the port is in use, or it is reachable without accepted tokens.
    """
    host = listen_host(host, LOOPBACK)
    handler = _handler(telemetry, is_ready, keyring_for("/metrics", host, tokens))
    try:
        server = HealthServer((host, port), handler)
    except OSError as error:
        raise ConfigError(f"cannot serve health and metrics on {authority(host, port)}: {error.strerror}") from error
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return int(server.server_address[1])


def _handler(
    telemetry: Telemetry, is_ready: Callable[[], bool], keyring: Keyring | None
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = HEALTH_TIMEOUT_S

        def do_GET(self) -> None:
            ready = is_ready()
            status, body = 404, b"not found\n"
            if self.path == "/healthz":
                status, body = 200, b"ok\n"
            elif self.path == "/readyz":
                status, body = (200, b"ready\n") if ready else (503, b"not ready\n")
            elif self.path == "/metrics":
                status, body = self._metrics()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _metrics(self) -> tuple[int, bytes]:
            scheme, _, token = self.headers.get("Authorization", "").partition(" ")
            role = keyring.role_of(token.strip()) if keyring and scheme.lower() == "bearer" else None
            if keyring and role is None:
                return 401, f"/metrics needs a token: see {TOKEN_FILE} in docs/threat_model.md\n".encode()
            if keyring and role not in (Role.VIEWER, Role.OPERATOR):
                return 403, f"role {role} may not read /metrics; use a viewer token\n".encode()
            return 200, telemetry.exposition()

        def log_message(self, format: str, *args: object) -> None:
            log.debug(format, *args)

    return Handler
