"""What the rollout server exposes: of all its workers together, and of each place of the fleet."""

from __future__ import annotations

from bapo.metrics.metric import PURPOSE, WORKER, Label, Metric, Process

HERE = (Process.ROLLOUT_SERVER,)
FATES = ("stored", "duplicate", "stale", "unknown", "failed")

SAMPLING = (
    Metric(
        "bapo_rollout_groups_total", "counter",
        "Groups sampled, by what the buffer said to them; purpose all: pushes that were not acknowledged.",
        "system/Rollout workers", HERE, (Label("purpose"), Label("outcome")),
    ),
    Metric(
        "bapo_rollout_tokens_total", "counter", "Response tokens sampled.", "ledger/Sampled", HERE, (PURPOSE,)
    ),
)  # fmt: skip

WORKERS = (
    Metric(
        "bapo_rollout_inflight_groups", "gauge", "Groups being sampled or graded.", "system/Rollout workers",
        HERE, (WORKER,),
    ),
    Metric(
        "bapo_rollout_policy_version", "gauge", "Policy version that a worker samples with.",
        "system/Rollout workers", HERE, (WORKER,),
    ),
    Metric(
        "bapo_rollout_workers", "gauge", "Workers, by state.", "system/Rollout workers", HERE,
        (Label("state", ("starting", "ready", "draining", "dead")),),
    ),
    Metric(
        "bapo_rollout_worker_restarts_total", "counter", "Workers that were replaced.", "system/Rollout workers", HERE
    ),
)  # fmt: skip

VERIFIERS = (
    Metric(
        "bapo_verifier_failures_total", "counter", "Verifier calls that raised or were killed.", "system/Verifiers",
        HERE, (Label("reason"),),
    ),
)  # fmt: skip

WEIGHTS = (
    Metric(
        "bapo_sync_failures_total", "counter", "Workers that did not take an update.", "system/Weight updates", HERE
    ),
)  # fmt: skip

METRICS = (*SAMPLING, *WORKERS, *VERIFIERS, *WEIGHTS)
