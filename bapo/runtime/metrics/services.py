"""Metrics of the small services, and those shared by several processes."""

from __future__ import annotations

from bapo.core.errors import Refusal
from bapo.runtime.metrics.metric import ALL, SPLIT, TRAINING, Label, Metric, Process

DISK = (Process.BUFFER_SERVICE, Process.LEARNER)
"""With only a buffer there is no learner, and the embedded Redis writes to the same disk."""
SCHEDULER = (
    Metric(
        "bapo_scheduler_requests_total", "counter", "Enqueued rollout requests, by purpose.", "ledger/Requested",
        (Process.SCHEDULER,), (TRAINING,),
    ),
    Metric(
        "bapo_stalled_seconds", "gauge", "Seconds since the last progress of the run.", "system/Bottleneck",
        (Process.SCHEDULER,),
    ),
    Metric(
        "bapo_reevaluation_rounds_total", "counter", "Re-evaluation rounds; empty: B_bad had no prompts.",
        "run/Re-evaluation", (Process.SCHEDULER,), (Label("outcome", ("asked", "empty")),),
    ),
    Metric(
        "bapo_reevaluation_duration_seconds", "histogram",
        "Duration of a re-evaluation round, polled about once per second.",
        "run/Re-evaluation", (Process.SCHEDULER,),
    ),
    Metric(
        "bapo_reevaluation_lag_steps", "gauge",
        "Steps since the oldest open re-evaluation round; 0: none.",
        "run/Re-evaluation", (Process.SCHEDULER,),
    ),
)  # fmt: skip

EVALUATOR = (
    Metric(
        "bapo_eval_accuracy_ratio", "gauge",
        "Held-out mean reward, by split: the accuracy where all rewards are 0 or 1. "
        "With fewer prompts than the base model's: that plus the change on them.",
        "run/Evaluation", (Process.EVALUATOR,), (SPLIT,)
    ),
    Metric(
        "bapo_eval_passk_ratio", "gauge",
        "pass@k: fraction of held-out prompts with a correct response (reward 1) among k; with fewer prompts as above.",
        "run/Evaluation", (Process.EVALUATOR,), (SPLIT, Label("k")),
    ),
    Metric(
        "bapo_eval_policy_version", "gauge", "Last evaluated policy version.", "run/Evaluation",
        (Process.EVALUATOR,), (SPLIT,),
    ),
)  # fmt: skip

SEVERAL = (
    Metric(
        "bapo_run_disk_free_bytes", "gauge",
        "Free space on the disk of the run directory.", "system/Checkpoints and disk",
        DISK,
    ),
    Metric(
        "bapo_run_disk_size_bytes", "gauge", "Size of that disk.", "system/Checkpoints and disk", DISK
    ),
    Metric(
        "bapo_build_info", "gauge",
        "Always 1; labels: version and commit (BAPO_COMMIT, else the git checkout, else unknown).",
        "system/Processes", ALL, (Label("version"), Label("commit")),
    ),
    Metric(
        "bapo_refused_requests_total", "counter", "Requests answered with 4xx, by reason.",
        "system/Buffer API and Redis", (Process.BUFFER_SERVICE, Process.ROLLOUT_SERVER, Process.DASHBOARD),
        (Label("reason", tuple(reason.value for reason in Refusal)),),
    ),
    Metric(
        "bapo_sync_duration_seconds", "histogram",
        "Duration of a weight update by phase: gather, write, digest, send (learner), fleet (rollout server).",
        "system/Weight updates", (Process.LEARNER, Process.ROLLOUT_SERVER), (Label("phase"),),
    ),
)  # fmt: skip

METRICS = (*SCHEDULER, *EVALUATOR, *SEVERAL)
