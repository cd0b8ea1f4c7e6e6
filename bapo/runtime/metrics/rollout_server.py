"""What the rollout server exposes: of all its workers together, and of each place of the fleet."""

from __future__ import annotations

from bapo.algorithms.autoscaling import Reason
from bapo.runtime.metrics.metric import PURPOSE, TASK, TOKENS, WORKER, Label, Metric, Process

HERE = (Process.ROLLOUT_SERVER,)

OUTCOMES = ("correct", "partial", "wrong", "error", "timeout", "killed")

SAMPLING = (
    Metric(
        "bapo_rollout_groups_total", "counter",
        "Groups sampled, by what the buffer said to them; purpose all: pushes that were not acknowledged.",
        "system/Rollout workers", HERE, (Label("purpose"), Label("outcome")),
    ),
    Metric(
        "bapo_rollout_tokens_total", "counter", "Response tokens sampled.", "ledger/Sampled", HERE, (PURPOSE,)
    ),
    Metric(
        "bapo_rollout_group_seconds", "histogram", "From the claim of a group to its last token.",
        "system/Rollout workers", HERE, (PURPOSE,), added_up=True,
    ),
    Metric(
        "bapo_rollout_response_tokens", "histogram", "Tokens of a response.", "run/Difficulty", HERE, (PURPOSE,),
        TOKENS, added_up=True,
    ),
    Metric(
        "bapo_rollout_truncated_total", "counter", "Responses that the length limit ended.", "run/Difficulty",
        HERE, (PURPOSE,),
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
    Metric(
        "bapo_rollout_worker_up", "gauge", "1: this worker samples.", "system/Rollout workers", HERE, (WORKER,)
    ),
    Metric(
        "bapo_rollout_worker_tokens_per_second", "gauge", "Tokens per second of a worker, of the last 10 s.",
        "system/Rollout workers", HERE, (WORKER,),
    ),
    Metric(
        "bapo_rollout_engine_responses", "gauge",
        "Responses in a worker's engine. running: get a token in each step; waiting: it has no room for them yet.",
        "system/Rollout workers", HERE, (WORKER, Label("state", ("running", "waiting"))),
    ),
    Metric(
        "bapo_rollout_engine_kv_cache_ratio", "gauge",
        "Share of an engine's key-value cache that is taken. Unknown: the engine has none.",
        "system/Rollout workers", HERE, (WORKER,),
    ),
    Metric(
        "bapo_rollout_worker_memory_bytes", "gauge", "Resident memory of a worker.", "system/Processes", HERE,
        (WORKER,),
    ),
)  # fmt: skip

SCALING = (
    Metric(
        "bapo_rollout_desired_workers", "gauge", "Workers that there should be: what HPA and KEDA scale on.",
        "system/Autoscaling", HERE,
    ),
    Metric(
        "bapo_rollout_needed_workers", "gauge", "Workers that the rates of learner and workers ask for, with headroom.",
        "system/Autoscaling", HERE,
    ),
    Metric(
        "bapo_rollout_scaling_reason", "gauge", "1: why the desired number of workers is what it is; else 0.",
        "system/Autoscaling", HERE, (Label("reason", tuple(reason.value for reason in Reason)),),
    ),
    Metric(
        "bapo_rollout_learner_wait_ratio", "gauge", "Share of the learner's time in which it had no batch.",
        "system/Autoscaling", HERE,
    ),
    Metric(
        "bapo_rollout_idle_ratio", "gauge", "Share of the ready workers' room that is empty.",
        "system/Autoscaling", HERE,
    ),
    Metric(
        "bapo_rollout_ready_batches", "gauge", "Fresh groups that wait for the learner, over B.",
        "system/Autoscaling", HERE,
    ),
    Metric(
        "bapo_rollout_consume_rate", "gauge", "Fresh groups/s that the learner takes while it does not wait.",
        "system/Autoscaling", HERE,
    ),
    Metric(
        "bapo_rollout_produce_rate", "gauge", "Fresh groups/s of one worker while its room is full.",
        "system/Autoscaling", HERE,
    ),
    Metric(
        "bapo_rollout_stale_ratio", "gauge", "Share of pushed fresh groups that were too old to be taken.",
        "system/Autoscaling", HERE,
    ),
    Metric(
        "bapo_rollout_version_lag_steps", "gauge", "Learner's step minus the oldest weights of a ready worker.",
        "system/Autoscaling", HERE,
    ),
)  # fmt: skip

VERIFIERS = (
    Metric(
        "bapo_verifier_results_total", "counter",
        "Responses by what the verifier gave: reward 1, 0, between; error, timeout, killed: none, for a whole group.",
        "system/Reward functions", HERE, (TASK, Label("outcome", OUTCOMES)),
    ),
    Metric(
        "bapo_verifier_seconds", "histogram", "Time to grade one group.", "system/Reward functions", HERE, (TASK,),
        added_up=True,
    ),
)  # fmt: skip

WEIGHTS = (
    Metric(
        "bapo_sync_failures_total", "counter", "Workers that did not take an update.", "system/Weight updates", HERE
    ),
    Metric(
        "bapo_sync_bytes_total", "counter", "Bytes of weights that workers took.", "system/Weight updates", HERE
    ),
)  # fmt: skip

METRICS = (*SAMPLING, *WORKERS, *SCALING, *VERIFIERS, *WEIGHTS)
