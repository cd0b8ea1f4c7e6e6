"""What the buffer service exposes: its tables, its batches and its API."""

from __future__ import annotations

from bapo.algorithms.composer import Reason
from bapo.runtime.metrics.metric import ORIGIN, PURPOSE, STEPS, TRAINING, Label, Metric, Process

HERE = (Process.BUFFER_SERVICE,)
TABLE = Label("table", ("fresh", "reevaluated", "bad", "high"))
LEFT_OUT = (
    Reason.ALL_INCORRECT, Reason.ALL_CORRECT, Reason.FILTERED, Reason.DUPLICATE_PROMPT, Reason.NO_VARIANCE,
    Reason.SURPLUS, Reason.STALE, Reason.NOT_USED,
)  # fmt: skip
"""Why a fresh group did not train."""
USE = Label("use", ("trained", "left_out", "stale"))
"""What became of a group at the first assembly that inspected it."""
ANSWERS = (
    Reason.IMPROVED, Reason.STILL_HARD, Reason.SOLVED, Reason.NO_ROOM, Reason.DUPLICATE_PROMPT, Reason.LEFT_BAD,
    Reason.NO_VARIANCE, Reason.NOT_USED,
)  # fmt: skip
"""What became of a hard prompt that was re-evaluated."""

MEMORY = Label("table", ("bad", "high"))
EVICTIONS = ("improved", "solved", "expired", "replaced", "full", "dropped")

TABLES = (
    Metric("bapo_buffer_groups", "gauge", "Groups or prompts held, by table.", "run/Buffers", HERE, (TABLE,)),
    Metric(
        "bapo_buffer_requests", "gauge", "Rollout requests, by purpose and state.", "system/Bottleneck",
        HERE, (PURPOSE, Label("state", ("queued", "leased"))),
    ),
    Metric("bapo_buffer_bytes", "gauge", "Payload bytes of the groups held.", "system/Buffer API and Redis", HERE),
    Metric(
        "bapo_buffer_capacity_groups", "gauge", "Most that a table may hold, where there is a limit.", "run/Buffers",
        HERE, (TABLE,),
    ),
    Metric(
        "bapo_buffer_inserted_total", "counter", "Entries that assemblies of this process put into a table.",
        "run/Buffers", HERE, (MEMORY,),
    ),
    Metric(
        "bapo_buffer_evicted_total", "counter",
        "Entries that assemblies of this process took out of a table: improved and solved leave bad, expired "
        "leave high; replaced: by a newer entry of the prompt; full: no room; dropped: the composer wants it no more.",
        "run/Buffers", HERE, (MEMORY, Label("reason", EVICTIONS)),
    ),
    Metric(
        "bapo_buffer_age_steps", "histogram", "Steps since birth of entries that were used: re-sampled, or trained.",
        "run/Buffers", HERE, (MEMORY,), STEPS,
    ),
)  # fmt: skip

BATCHES = (
    Metric("bapo_batch_groups", "gauge", "Groups in the last batch.", "run/Batch composition", HERE, (ORIGIN,)),
    Metric(
        "bapo_batch_trained_groups_total", "counter", "Groups in all batches that this process assembled.",
        "run/Batch composition", HERE, (ORIGIN,),
    ),
    Metric("bapo_batch_capacity_groups", "gauge", "B.", "run/Batch composition", HERE),
    Metric(
        "bapo_batch_fill_ratio", "gauge", "Share of B that the last batch has.", "run/Batch composition", HERE
    ),
    Metric(
        "bapo_batch_filtered_groups_total", "counter", "Fresh groups that no batch trained.",
        "run/Batch composition", HERE, (Label("reason", LEFT_OUT),),
    ),
    Metric(
        "bapo_threshold_ratio", "gauge", "Current thresholds: c1, c2, c3.", "run/Difficulty", HERE,
        (Label("name", ("c1", "c2", "c3")),),
    ),
    Metric("bapo_reward_global_mean_ratio", "gauge", "r_tot of eq. 8.", "run/Difficulty", HERE),
    Metric(
        "bapo_reevaluation_prompts_total", "counter", "Hard prompts that were re-sampled, by outcome.",
        "run/Re-evaluation", HERE, (Label("outcome", ANSWERS),),
    ),
)  # fmt: skip

LEDGER = (
    Metric(
        "bapo_ledger_tokens_total",
        "counter",
        "Response tokens of groups that assemblies of this process looked at.",
        "ledger/Outcome",
        HERE,
        (TRAINING, USE),
    ),
    Metric(
        "bapo_ledger_responses_total",
        "counter",
        "Responses of the same groups.",
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
        "Groups that failed before they had rewards.",
        "system/Reward functions",
        HERE,
        (Label("reason"),),
    ),
    Metric(
        "bapo_buffer_operation_seconds",
        "histogram",
        "Time of one API operation that was answered with 200.",
        "system/Buffer API and Redis",
        HERE,
        (Label("operation"),),
    ),
    Metric(
        "bapo_buffer_redis_errors_total", "counter", "Redis calls that failed.", "system/Buffer API and Redis", HERE
    ),
    Metric(
        "bapo_buffer_redis_up",
        "gauge",
        "1: Redis answers; 0: it does not, and what it holds is not known.",
        "system/Buffer API and Redis",
        HERE,
    ),
    Metric(
        "bapo_buffer_redis_persistent",
        "gauge",
        "1: what is acknowledged survives the end of Redis.",
        "system/Buffer API and Redis",
        HERE,
    ),
    Metric(
        "bapo_buffer_redis_memory_bytes",
        "gauge",
        "Memory that the whole Redis uses.",
        "system/Buffer API and Redis",
        HERE,
    ),
    Metric(
        "bapo_buffer_redis_memory_limit_bytes",
        "gauge",
        "Its maxmemory; NaN: it has none.",
        "system/Buffer API and Redis",
        HERE,
    ),
)

RUN = (
    Metric(
        "bapo_run_info", "gauge", "1; what this run is.", "run/Overview", HERE,
        (Label("preset"), Label("algorithm"), Label("model"), Label("task"), Label("engine")),
    ),
    Metric("bapo_run_target_steps", "gauge", "T.", "run/Overview", HERE),
    Metric(
        "bapo_run_committed_steps", "gauge", "Steps that are trained, as the buffer knows; the run ends with T.",
        "run/Overview", HERE,
    ),
    Metric(
        "bapo_cadence_steps", "gauge", "v, m and the most staleness of a fresh group.", "run/Off-policy drift", HERE,
        (Label("name", ("v", "m", "max_staleness")),),
    ),
)  # fmt: skip

METRICS = (*TABLES, *BATCHES, *LEDGER, *API, *RUN)
