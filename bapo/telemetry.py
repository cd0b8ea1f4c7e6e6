"""Every metric that a process exposes: name, type, help and labels in one list, and the server that shows them.

Rules: `bapo_<component>_<thing>_<unit>`, base units, bounded labels; never a prompt id, step or version as a label.
A process makes one `Telemetry` with its own registry and takes its metrics from it by name: a metric that is not in
METRICS cannot be made.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from bapo.errors import ConfigError
from bapo.tokens import TOKEN_FILE, Role, keyring_for

log = logging.getLogger(__name__)
disable_created_metrics()  # type: ignore[no-untyped-call]

LOOPBACK = "127.0.0.1"
HEALTH_TIMEOUT_S = 10.0
"""Longest silence of a connection to a health server: each has a thread."""
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
STEPS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the registry."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS


METRICS: tuple[Metric, ...] = (
    Metric("bapo_buffer_groups", "gauge", "Groups or prompts held, by table.", ("table",)),
    Metric("bapo_buffer_requests", "gauge", "Rollout requests, by purpose and state.", ("purpose", "state")),
    Metric("bapo_buffer_ingested_groups_total", "counter", "Groups pushed, by fate.", ("fate",)),
    Metric("bapo_refused_requests_total", "counter", "Requests answered with 4xx, by reason.", ("reason",)),
    Metric("bapo_buffer_failed_groups_total", "counter", "Groups that failed before they had rewards.", ("reason",)),
    Metric("bapo_buffer_operation_seconds", "histogram", "Time of one API operation.", ("operation",)),
    Metric("bapo_buffer_bytes", "gauge", "Payload bytes of the groups held."),
    Metric("bapo_batch_filtered_groups_total", "counter", "Fresh groups that no batch trained.", ("reason",)),
    Metric("bapo_buffer_redis_errors_total", "counter", "Redis calls that failed."),
    Metric("bapo_batch_groups", "gauge", "Groups in the last assembled batch.", ("origin",)),
    Metric("bapo_batch_trained_groups_total", "counter", "Groups in all assembled batches.", ("origin",)),
    Metric("bapo_batch_capacity_groups", "gauge", "B."),
    Metric("bapo_threshold_ratio", "gauge", "Current thresholds.", ("name",)),
    Metric("bapo_reward_global_mean_ratio", "gauge", "r_tot of eq. 8."),
    Metric("bapo_reevaluation_prompts_total", "counter", "Re-evaluated prompts, by outcome.", ("outcome",)),
    Metric("bapo_rollout_groups_total", "counter", "Groups sampled.", ("purpose", "outcome")),
    Metric("bapo_rollout_tokens_total", "counter", "Tokens sampled.", ("purpose",)),
    Metric("bapo_rollout_inflight_groups", "gauge", "Groups being sampled or graded.", ("worker",)),
    Metric("bapo_rollout_policy_version", "gauge", "Policy version that a worker samples with.", ("worker",)),
    Metric("bapo_rollout_workers", "gauge", "Workers, by state.", ("state",)),
    Metric("bapo_rollout_worker_restarts_total", "counter", "Workers that were replaced."),
    Metric("bapo_verifier_failures_total", "counter", "Verifier calls that raised or were killed.", ("reason",)),
    Metric("bapo_sync_duration_seconds", "histogram", "Seconds of one weight update.", ("phase",)),
    Metric("bapo_sync_failures_total", "counter", "Workers that did not take an update."),
    Metric("bapo_learner_step", "gauge", "Step t that the learner is in."),
    Metric("bapo_learner_policy_version", "gauge", "Newest version that was published."),
    Metric("bapo_learner_loss", "gauge", "Loss of the last mini-batch."),
    Metric("bapo_learner_grad_norm", "gauge", "Gradient norm before clipping."),
    Metric("bapo_learner_entropy_nats", "gauge", "Mean token entropy."),
    Metric("bapo_learner_clip_ratio", "gauge", "Share of tokens whose ratio is clipped."),
    Metric("bapo_learner_tv_ratio", "gauge", "Total variation of pi_theta_t and alpha.", ("origin", "kind")),
    Metric("bapo_learner_kl_nats", "gauge", "KL of alpha and pi_theta_t, per response.", ("origin", "direction")),
    Metric("bapo_learner_ess_ratio", "gauge", "Share of responses or tokens that still count.", ("origin", "level")),
    Metric("bapo_learner_importance_ratio_max", "gauge", "Largest pi_theta_t / alpha.", ("origin",)),
    Metric("bapo_learner_improvement_bound", "gauge", "Theorem 3.2, estimated; <= 0: vacuous.", ("origin", "form")),
    Metric("bapo_learner_improvement_penalty", "gauge", "Its penalties: K TV and TV, without a 2.", ("origin", "of")),
    Metric("bapo_learner_stability_constant", "gauge", "K_1, K_2, K_3 of theorem 3.2.", ("origin",)),
    Metric("bapo_learner_tokens_total", "counter", "Response tokens trained."),
    Metric("bapo_learner_phase_seconds", "histogram", "Seconds of one phase of a step.", ("phase",)),
    Metric("bapo_learner_staleness_steps", "histogram", "Step minus policy version.", ("origin",), STEPS),
    Metric("bapo_learner_last_step_timestamp_seconds", "gauge", "Unix time of the last finished step."),
    Metric("bapo_checkpoint_last_success_timestamp_seconds", "gauge", "Unix time of the last checkpoint."),
    Metric("bapo_scheduler_requests_total", "counter", "Requests enqueued.", ("purpose",)),
    Metric("bapo_stalled_seconds", "gauge", "Seconds since anything moved in the run."),
    Metric("bapo_eval_accuracy_ratio", "gauge", "Held-out accuracy.", ("split",)),
)
_BY_NAME = {metric.name: metric for metric in METRICS}


class Telemetry:
    """The metrics of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._made: dict[str, Counter | Gauge | Histogram] = {}
        self._lock = threading.Lock()

    def counter(self, name: str) -> Counter:
        """The counter of this name; raises KeyError when METRICS does not list it."""
        made = self._get(name)
        assert isinstance(made, Counter), name
        return made

    def gauge(self, name: str) -> Gauge:
        """The gauge of this name."""
        made = self._get(name)
        assert isinstance(made, Gauge), name
        return made

    def histogram(self, name: str) -> Histogram:
        """The histogram of this name."""
        made = self._get(name)
        assert isinstance(made, Histogram), name
        return made

    def exposition(self) -> bytes:
        """What `/metrics` answers (text format)."""
        return generate_latest(self.registry)

    def _get(self, name: str) -> Counter | Gauge | Histogram:
        with self._lock:
            if name not in self._made:
                self._made[name] = self._make(_BY_NAME[name])
            return self._made[name]

    def _make(self, metric: Metric) -> Counter | Gauge | Histogram:
        if metric.kind == "counter":
            return Counter(metric.name, metric.help, metric.labels, registry=self.registry)
        if metric.kind == "gauge":
            return Gauge(metric.name, metric.help, metric.labels, registry=self.registry)
        return Histogram(metric.name, metric.help, metric.labels, registry=self.registry, buckets=metric.buckets)


def serve_health(
    telemetry: Telemetry, port: int, is_ready: Callable[[], bool], host: str | None = None, tokens: str = "auto"
) -> int:
    """Answer /healthz, /readyz and /metrics from a daemon thread; returns the port (useful for port 0).

    For processes without an API of their own (learner, scheduler, evaluator). They listen on the loopback, unless
    BAPO_HOST says otherwise: in a container another one has to reach them. Beyond it, /metrics asks for a token.
    Args:
        tokens: `security.tokens` of the configuration.
    Raises: ConfigError when the port is taken, or others reach it and no accepted tokens are named.
    """
    host = host or os.environ.get("BAPO_HOST", LOOPBACK)
    keyring = keyring_for("/metrics", host, tokens)

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
                return 403, f"{role} may not read /metrics; use the token of viewer\n".encode()
            return 200, telemetry.exposition()

        def log_message(self, format: str, *args: object) -> None:
            log.debug(format, *args)

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise ConfigError(f"cannot serve health and metrics on {host}:{port}: {error.strerror}") from error
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return int(server.server_address[1])
