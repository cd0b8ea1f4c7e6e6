"""Metrics of the rollout server: of all its workers, and of each worker slot."""

from __future__ import annotations

from bapo.config.autoscaling import ScalingReason
from bapo.runtime.metrics.metric import CALL_SECONDS, PURPOSE, TASK, TOKENS, WORKER, Label, Metric, Process

HERE = (Process.ROLLOUT_SERVER,)

OUTCOMES = ("correct", "partial", "wrong", "busy", "error", "timeout", "killed")

EPISODE_FAILURES = ("ungraded", "given_back", "silent")

SAMPLING = (
    Metric(
        "bapo_rollout_groups_total", "counter",
        "Sampled groups, by result of the push; purpose all: pushes without acknowledgement.",
        "system/Rollout workers", HERE, (Label("purpose"), Label("outcome")),
    ),
    Metric(
        "bapo_rollout_tokens_total", "counter", "Sampled response tokens.", "ledger/Sampled", HERE, (PURPOSE,)
    ),
    Metric(
        "bapo_rollout_group_seconds", "histogram", "Time from the claim of a group to its last token.",
        "system/Rollout workers", HERE, (PURPOSE,), added_up=True,
    ),
    Metric(
        "bapo_rollout_response_tokens", "histogram", "Length of a response.", "run/Difficulty", HERE, (PURPOSE,),
        TOKENS, added_up=True,
    ),
    Metric(
        "bapo_rollout_truncated_total", "counter", "Responses truncated by the length limit.", "run/Difficulty",
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
        "bapo_rollout_worker_restarts_total", "counter", "Worker restarts.", "system/Rollout workers", HERE
    ),
    Metric(
        "bapo_rollout_worker_up", "gauge",
        "1: the worker is sampling; 0: it is not.", "system/Rollout workers", HERE, (WORKER,)
    ),
    Metric(
        "bapo_rollout_worker_tokens_per_second", "gauge", "Tokens per second of a worker over the last 10 s.",
        "system/Rollout workers", HERE, (WORKER,),
    ),
    Metric(
        "bapo_rollout_engine_responses", "gauge",
        "Responses in a worker's engine. running: in the current batch; waiting: no room yet.",
        "system/Rollout workers", HERE, (WORKER, Label("state", ("running", "waiting"))),
    ),
    Metric(
        "bapo_rollout_engine_kv_cache_ratio", "gauge",
        "Fraction of an engine's KV cache in use; NaN: no cache.",
        "system/Rollout workers", HERE, (WORKER,),
    ),
    Metric(
        "bapo_rollout_worker_memory_bytes", "gauge", "Resident memory of a worker.", "system/Processes", HERE,
        (WORKER,),
    ),
)  # fmt: skip

SCALING = (
    Metric(
        "bapo_rollout_desired_workers", "gauge", "Desired number of workers; HPA and KEDA scale on it.",
        "system/Autoscaling", HERE,
    ),
    Metric(
        "bapo_rollout_needed_workers", "gauge", "Workers needed to match the learner's rate, with headroom.",
        "system/Autoscaling", HERE,
    ),
    Metric(
        "bapo_rollout_scaling_reason", "gauge", "1 for the reason of the desired number of workers, 0 for the others.",
        "system/Autoscaling", HERE, (Label("reason", tuple(reason.value for reason in ScalingReason)),),
    ),
    Metric(
        "bapo_rollout_learner_wait_ratio", "gauge", "Fraction of time that the learner waits for a batch.",
        "system/Autoscaling", HERE,
    ),
    Metric(
        "bapo_rollout_idle_ratio", "gauge", "Idle fraction of the ready workers' capacity.",
        "system/Autoscaling", HERE,
    ),
    Metric(
        "bapo_rollout_ready_batches", "gauge", "Fresh groups ready for the learner, divided by B.",
        "system/Autoscaling", HERE,
    ),
    Metric(
        "bapo_rollout_consume_rate", "gauge",
        "Fresh groups per second consumed by the learner while it is not waiting.",
        "system/Autoscaling", HERE,
    ),
    Metric(
        "bapo_rollout_produce_rate", "gauge", "Fresh groups per second of one worker at full load.",
        "system/Autoscaling", HERE,
    ),
    Metric(
        "bapo_rollout_stale_ratio", "gauge", "Fraction of pushed fresh groups that were dropped as stale.",
        "system/Autoscaling", HERE,
    ),
    Metric(
        "bapo_rollout_version_lag_steps", "gauge", "Learner step minus the oldest policy version of a ready worker.",
        "system/Autoscaling", HERE,
    ),
)  # fmt: skip

VERIFIERS = (
    Metric(
        "bapo_verifier_results_total", "counter",
        "Graded responses: correct (1), wrong (0), busy (0, it kept the verifier busy), partial (between); "
        "error, timeout, killed: not graded.",
        "system/Reward functions", HERE, (TASK, Label("outcome", OUTCOMES)),
    ),
    Metric(
        "bapo_verifier_seconds", "histogram", "Time to grade one group.", "system/Reward functions", HERE, (TASK,),
        added_up=True,
    ),
)  # fmt: skip

WEIGHTS = (
    Metric(
        "bapo_sync_failures_total", "counter",
        "Workers that failed to load a weight update.", "system/Weight updates", HERE
    ),
    Metric(
        "bapo_sync_undecided_total", "counter",
        "Checks that could not tell new weights from old ones (kernels), or the adapter from the base model (base).",
        "system/Weight updates", HERE, (Label("check", ("kernels", "base")),),
    ),
    Metric(
        "bapo_sync_bytes_total", "counter", "Bytes of weights loaded by workers.", "system/Weight updates", HERE
    ),
)  # fmt: skip

AGENTS = (
    Metric(
        "bapo_episodes", "gauge", "Episodes of agents. open: an agent has it; waiting: for an agent.",
        "system/Agents", HERE, (Label("state", ("open", "waiting")),),
    ),
    Metric(
        "bapo_episode_oldest_seconds", "gauge", "Time since the oldest open episode was opened.",
        "system/Agents", HERE,
    ),
    Metric(
        "bapo_episode_events_total", "counter",
        "Episodes opened and ended with a reward, calls of the model (turn), calls whose history was changed, so that "
        "it could not be continued (fork), replies that end at the max_tokens of the agent (cut), and calls of tools "
        "that the parser could not read (malformed).",
        "system/Agents", HERE, (Label("event", ("opened", "turn", "fork", "cut", "malformed", "ended")),),
    ),
    Metric(
        "bapo_episode_failures_total", "counter",
        "Attempts at an episode that ended without a reward, by reason; none counts as a reward of 0.",
        "system/Agents", HERE, (Label("reason", EPISODE_FAILURES),),
    ),
    Metric(
        "bapo_episode_call_seconds", "histogram",
        "Time of a call of the model in the engine, and until its record is durable (journal).",
        "system/Agents", HERE, (Label("phase", ("engine", "journal")),), CALL_SECONDS, added_up=True,
    ),
)  # fmt: skip

METRICS = (*SAMPLING, *WORKERS, *SCALING, *VERIFIERS, *WEIGHTS, *AGENTS)
