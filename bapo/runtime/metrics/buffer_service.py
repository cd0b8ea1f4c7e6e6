"""Metrics of the buffer service: tables, batches and API."""

from __future__ import annotations

from bapo.algorithms.composer import Reason
from bapo.runtime.metrics.metric import ORIGIN, PURPOSE, STEPS, TRAINING, Label, Metric, Process

HERE = (Process.BUFFER_SERVICE,)
TABLE = Label("table", ("fresh", "reevaluated", "bad", "high"))
LEFT_OUT = (
    Reason.ALL_INCORRECT, Reason.ALL_CORRECT, Reason.FILTERED, Reason.DUPLICATE_PROMPT, Reason.NO_VARIANCE,
    Reason.SURPLUS, Reason.STALE, Reason.NOT_USED,
)  # fmt: skip
"""Why a fresh group was not trained."""
USE = Label("use", ("trained", "left_out", "stale"))
"""Outcome of a group at the first assembly that read it."""
ANSWERS = (
    Reason.IMPROVED, Reason.STILL_HARD, Reason.SOLVED, Reason.NO_ROOM, Reason.DUPLICATE_PROMPT, Reason.LEFT_BAD,
    Reason.NO_VARIANCE, Reason.NOT_USED,
)  # fmt: skip
"""Outcome of a re-evaluated hard prompt."""

MEMORY = Label("table", ("bad", "high"))
EVICTIONS = ("improved", "solved", "expired", "replaced", "full", "dropped")

TABLES = (
    Metric("bapo_buffer_groups", "gauge", "Groups or prompts stored, by table.", "run/Buffers", HERE, (TABLE,)),
    Metric(
        "bapo_buffer_requests", "gauge", "Rollout requests, by purpose and state.", "system/Bottleneck",
        HERE, (PURPOSE, Label("state", ("queued", "leased"))),
    ),
    Metric("bapo_buffer_bytes", "gauge", "Payload bytes of the stored groups.", "system/Buffer API and Redis", HERE),
    Metric(
        "bapo_buffer_capacity_groups", "gauge", "Capacity of a table, if it has one.", "run/Buffers",
        HERE, (TABLE,),
    ),
    Metric(
        "bapo_buffer_inserted_total", "counter", "Entries that this process added to a table.",
        "run/Buffers", HERE, (MEMORY,),
    ),
    Metric(
        "bapo_buffer_evicted_total", "counter",
        "Entries that this process removed from a table: improved and solved leave bad, expired "
        "leave high; replaced: by a newer entry of the prompt; full: no room; dropped: by the composer.",
        "run/Buffers", HERE, (MEMORY, Label("reason", EVICTIONS)),
    ),
    Metric(
        "bapo_buffer_age_steps", "histogram", "Age in steps of used entries: re-evaluated, or trained.",
        "run/Buffers", HERE, (MEMORY,), STEPS,
    ),
)  # fmt: skip

BATCHES = (
    Metric("bapo_batch_groups", "gauge", "Groups in the last batch.", "run/Batch composition", HERE, (ORIGIN,)),
    Metric(
        "bapo_batch_trained_groups_total", "counter", "Groups in all batches that this process assembled.",
        "run/Batch composition", HERE, (ORIGIN,),
    ),
    Metric("bapo_batch_capacity_groups", "gauge", "Batch capacity B.", "run/Batch composition", HERE),
    Metric(
        "bapo_batch_fill_ratio", "gauge", "Groups in the last batch, as a fraction of B.", "run/Batch composition", HERE
    ),
    Metric(
        "bapo_batch_fresh_groups_total", "counter",
        "Fresh groups that this process read for batches, trained or not; equal: zero variance, no advantage.",
        "run/Batch composition", HERE, (Label("rewards", ("differ", "equal")),),
    ),
    Metric(
        "bapo_batch_filtered_groups_total", "counter", "Fresh groups that were not trained, by reason.",
        "run/Batch composition", HERE, (Label("reason", LEFT_OUT),),
    ),
    Metric(
        "bapo_threshold_ratio", "gauge",
        "Current thresholds: c1, c2, c3; NaN where the method does not decide by them.",
        "run/Difficulty", HERE,
        (Label("name", ("c1", "c2", "c3")),),
    ),
    Metric(
        "bapo_reward_global_mean_ratio", "gauge",
        "r_tot of eq. 8: mean reward of fresh groups.", "run/Difficulty", HERE,
    ),
    Metric(
        "bapo_reevaluation_prompts_total", "counter", "Re-evaluated hard prompts, by outcome.",
        "run/Re-evaluation", HERE, (Label("outcome", ANSWERS),),
    ),
)  # fmt: skip

LEDGER = (
    Metric(
        "bapo_ledger_tokens_total",
        "counter",
        "Response tokens of the groups that this process read for batches, by use.",
        "ledger/Outcome",
        HERE,
        (TRAINING, USE),
    ),
    Metric(
        "bapo_ledger_responses_total",
        "counter",
        "Responses of these groups.",
        "ledger/Outcome",
        HERE,
        (TRAINING, USE),
    ),
)

API = (
    Metric(
        "bapo_buffer_ingested_groups_total",
        "counter",
        "Groups pushed, by result.",
        "system/Buffer API and Redis",
        HERE,
        (Label("result", ("stored", "duplicate", "stale", "unknown")),),
    ),
    Metric(
        "bapo_buffer_failed_groups_total",
        "counter",
        "Failed groups, by reason.",
        "system/Reward functions",
        HERE,
        (Label("reason"),),
    ),
    Metric(
        "bapo_buffer_operation_seconds",
        "histogram",
        "Duration of a successful API call.",
        "system/Buffer API and Redis",
        HERE,
        (Label("operation"),),
    ),
    Metric("bapo_buffer_redis_errors_total", "counter", "Failed calls to Redis.", "system/Buffer API and Redis", HERE),
    Metric(
        "bapo_buffer_redis_up",
        "gauge",
        "1: Redis responds; 0: it does not, and gauges of its content are unknown.",
        "system/Buffer API and Redis",
        HERE,
    ),
    Metric(
        "bapo_buffer_redis_persistent",
        "gauge",
        "1: acknowledged groups survive a crash of Redis.",
        "system/Buffer API and Redis",
        HERE,
    ),
    Metric(
        "bapo_buffer_redis_memory_bytes",
        "gauge",
        "Memory used by Redis.",
        "system/Buffer API and Redis",
        HERE,
    ),
    Metric(
        "bapo_buffer_redis_memory_limit_bytes",
        "gauge",
        "maxmemory of Redis; NaN: unlimited.",
        "system/Buffer API and Redis",
        HERE,
    ),
)

RUN = (
    Metric(
        "bapo_run_info", "gauge", "Always 1; the labels describe the run.", "run/Overview", HERE,
        (Label("preset"), Label("algorithm"), Label("model"), Label("task"), Label("engine")),
    ),
    Metric(
        "bapo_run_target_steps", "gauge",
        "Total steps of the run: T, or the last step of a run that ended before (evaluation.patience).",
        "run/Overview", HERE,
    ),
    Metric("bapo_run_committed_steps", "gauge", "Committed steps; the run has ended at T.", "run/Overview", HERE),
    Metric(
        "bapo_cadence_steps", "gauge",
        "weight_sync_interval (v), reevaluation_interval (m), and maximum staleness of a fresh group.",
        "run/Off-policy drift", HERE,
        (Label("name", ("v", "m", "max_staleness")),),
    ),
)  # fmt: skip

METRICS = (*TABLES, *BATCHES, *LEDGER, *API, *RUN)
