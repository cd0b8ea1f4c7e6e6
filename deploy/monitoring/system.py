"""BAPO / System: who waits for whom, workers, weights, verifiers, Redis, memory and disk."""

from __future__ import annotations

from deploy.monitoring.grafana import Dashboard, Panel, Query, Row
from deploy.monitoring.run import newest, per_minute

WAITS = Row("Who waits for whom", (
    Panel(title="Where a step's time goes", help="Mean seconds of each phase of a step. wait_batch: workers are the "
          "bottleneck; update: the learner is.", unit="s", stack=True, lowest=0, queries=(Query(
        'sum by (phase) (rate(bapo_learner_phase_seconds_sum{phase!="step"}[5m])) '
        "/ scalar(sum(rate(bapo_learner_steps_total[5m])))", "{{phase}}"),)),
    Panel(title="Requests", help="queued: workers are busy; leased: they are being sampled.", lowest=0,
          queries=(Query(newest("bapo_buffer_requests", "purpose", "state"), "{{purpose}} {{state}}"),)),
    Panel(title="Nothing has moved for", help="Seconds without any progress of the run.", unit="s", lowest=0,
          queries=(Query(newest("bapo_stalled_seconds"), "{{run}}"),)),
))  # fmt: skip

WORKERS = Row("Rollout workers", (
    Panel(title="Version that each worker samples with", help="The learner's newest beside it.", queries=(
        Query("max by (worker) (bapo_rollout_policy_version)", "{{worker}}"),
        Query(newest("bapo_learner_policy_version"), "published"))),
    Panel(title="Groups in flight", help="Being sampled or graded.", lowest=0, queries=(
        Query("max by (worker) (bapo_rollout_inflight_groups)", "{{worker}}"),)),
    Panel(title="Tokens per second", help="Of each worker, over 10 s.", lowest=0, stack=True, queries=(
        Query("max by (worker) (bapo_rollout_worker_tokens_per_second)", "{{worker}}"),)),
    Panel(title="Workers", help="By state.", lowest=0, stack=True, queries=(
        Query("sum by (state) (bapo_rollout_workers)", "{{state}}"),)),
    Panel(title="Seconds per group", help="From claim to last token: median and 95th percentile.", unit="s", lowest=0,
          queries=tuple(Query(
        f"histogram_quantile({share}, sum by (le, purpose) (rate(bapo_rollout_group_seconds_bucket[5m])))",
        f"{{{{purpose}}}} {word}") for share, word in ((0.5, "median"), (0.95, "95 %")))),
    Panel(title="Groups per minute", help="By what the buffer said to them.", lowest=0, queries=(
        Query(per_minute("bapo_rollout_groups_total", "purpose", "outcome"), "{{purpose}} {{outcome}}"),)),
    Panel(title="Responses in the engine", help="running: get a token in each step; waiting: no room for them yet.",
          lowest=0, width=12, queries=(
        Query("max by (worker, state) (bapo_rollout_engine_responses)", "{{worker}} {{state}}"),)),
    Panel(title="Key-value cache", help="Share that is taken. Near 1 with responses that wait: fewer of them fit than "
          "max_groups_in_flight allows.", unit="percentunit", lowest=0, highest=1, width=12, queries=(
        Query("max by (worker) (bapo_rollout_engine_kv_cache_ratio)", "{{worker}}"),)),
    Panel(title="Workers that sample", help="1: yes.", lowest=0, width=12, height=5, queries=(
        Query("max by (worker) (bapo_rollout_worker_up)", "{{worker}}"),)),
    Panel(title="Replaced workers", help="So far.", lowest=0, width=12, height=5, queries=(
        Query("sum by (run) (bapo_rollout_worker_restarts_total)", "{{run}}"),)),
))  # fmt: skip

AUTOSCALING = Row("Autoscaling", (
    Panel(title="Workers: desired, needed, ready", help="What the rule wants, what the rates ask for, what there is.",
          lowest=0, queries=(
        Query("max by (run) (bapo_rollout_desired_workers)", "desired"),
        Query("max by (run) (bapo_rollout_needed_workers)", "needed"),
        Query('sum by (run) (bapo_rollout_workers{state="ready"})', "ready"))),
    Panel(title="Why", help="The rule's reason at each moment.", lowest=0, stack=True, queries=(
        Query("max by (reason) (bapo_rollout_scaling_reason) > 0", "{{reason}}"),)),
    Panel(title="Who waits", help="Share of time that the learner has no batch; of the workers' room that is empty.",
          unit="percentunit", lowest=0, highest=1, queries=(
        Query("max by (run) (bapo_rollout_learner_wait_ratio)", "learner"),
        Query("max by (run) (bapo_rollout_idle_ratio)", "workers"))),
    Panel(title="Fresh groups per second", help="Taken by a learner that does not wait; made by one busy worker.",
          lowest=0, queries=(
        Query("max by (run) (bapo_rollout_consume_rate)", "learner"),
        Query("max by (run) (bapo_rollout_produce_rate)", "one worker"))),
    Panel(title="Batches ready", help="Fresh groups that wait for the learner, over B.", lowest=0, queries=(
        Query("max by (run) (bapo_rollout_ready_batches)", "{{run}}"),)),
    Panel(title="Staleness", help="Steps that the oldest ready worker is behind, and the share of pushes too old.",
          lowest=0, queries=(
        Query("max by (run) (bapo_rollout_version_lag_steps)", "lag in steps"),
        Query("max by (run) (bapo_rollout_stale_ratio)", "share too old"))),
))  # fmt: skip

WEIGHTS = Row("Weight updates", (
    Panel(title="Duration by phase", help="gather, write, send by the learner; fleet: all workers, of send.", unit="s",
          lowest=0, queries=(Query("sum by (phase) (rate(bapo_sync_duration_seconds_sum[5m])) "
                                   "/ sum by (phase) (rate(bapo_sync_duration_seconds_count[5m]))", "{{phase}}"),)),
    Panel(title="Bytes per second", help="Weights that workers took.", unit="Bps", lowest=0, queries=(
        Query("sum by (run) (rate(bapo_sync_bytes_total[$__rate_interval]))", "{{run}}"),)),
    Panel(title="Failures", help="Workers that did not take an update, so far: each is replaced.", lowest=0, queries=(
        Query("sum by (run) (bapo_sync_failures_total)", "{{run}}"),)),
))  # fmt: skip

VERIFIERS = Row("Verifiers", (
    Panel(title="Verdicts per minute", help="Responses; error, timeout and killed are never counted as wrong.",
          stack=True, lowest=0, queries=(
        Query(per_minute("bapo_verifier_results_total", "outcome") + " > 0", "{{outcome}}"),)),
    Panel(title="Seconds per group", help="Median and 95th percentile.", unit="s", lowest=0, queries=tuple(Query(
        f"histogram_quantile({share}, sum by (le, task) (rate(bapo_verifier_seconds_bucket[5m])))",
        f"{{{{task}}}} {word}") for share, word in ((0.5, "median"), (0.95, "95 %")))),
    Panel(title="Failed groups", help="So far, by reason; each is asked again a limited number of times. 0: none.",
          lowest=0, queries=(
        Query('sum by (reason) (bapo_buffer_failed_groups_total) or label_replace(vector(0), "reason", "none", "", "")',
              "{{reason}}"),)),
))  # fmt: skip

BUFFER = Row("Buffer API and Redis", (
    Panel(title="Calls per second", help="By operation.", unit="reqps", lowest=0, queries=(
        Query("sum by (operation) (rate(bapo_buffer_operation_seconds_count[$__rate_interval])) > 0",
              "{{operation}}"),)),
    Panel(title="95th percentile of a call", help="By operation; waiting calls are left out.", unit="s", lowest=0,
          queries=(Query("histogram_quantile(0.95, sum by (operation, le) "
                         "(rate(bapo_buffer_operation_seconds_bucket[5m]))) > 0", "{{operation}}"),)),
    Panel(title="Pushed groups per minute", help="By fate.", lowest=0, queries=(
        Query(per_minute("bapo_buffer_ingested_groups_total", "fate"), "{{fate}}"),)),
    Panel(title="Redis memory", help="Of the whole Redis, and of the groups in it.", unit="bytes", lowest=0, queries=(
        Query(newest("bapo_buffer_redis_memory_bytes"), "used"),
        Query(newest("bapo_buffer_redis_memory_limit_bytes"), "maxmemory"),
        Query(newest("bapo_buffer_bytes"), "groups"))),
    Panel(title="Redis answers and persists", help="1: yes. Not persistent: what is acknowledged may be lost.",
          lowest=0, highest=1, queries=(
        Query("min by (run) (bapo_buffer_redis_up)", "answers"),
        Query("min by (run) (bapo_buffer_redis_persistent)", "persists"))),
    Panel(title="Errors", help="Redis calls that failed, and requests that were refused, so far.", lowest=0, queries=(
        Query("sum by (run) (bapo_buffer_redis_errors_total)", "redis"),
        Query("sum by (reason) (bapo_refused_requests_total) > 0", "refused: {{reason}}"))),
))  # fmt: skip

PROCESSES = Row("Processes", (
    Panel(title="Up", help="1: Prometheus reaches its /metrics.", lowest=0, highest=1, queries=(
        Query('max by (process) (up{process!=""})', "{{process}}"),)),
    Panel(title="Memory", help="Resident, of each process; workers are processes of their own.", unit="bytes",
          lowest=0, queries=(
        Query("max by (process) (process_resident_memory_bytes)", "{{process}}"),
        Query("max by (worker) (bapo_rollout_worker_memory_bytes)", "{{worker}}"),
        Query("max by (kind) (bapo_learner_peak_memory_bytes)", "learner, peak {{kind}}"))),
    Panel(title="CPU", help="Cores that each process uses; workers are not in it.", lowest=0, queries=(
        Query("max by (process) (rate(process_cpu_seconds_total[1m]))", "{{process}}"),)),
    Panel(kind="table", title="Versions", help="What each process runs.", width=24, height=6, queries=(
        Query("max by (run, process, version, commit) (bapo_build_info)"),)),
))  # fmt: skip

CHECKPOINTS = Row("Checkpoints and disk", (
    Panel(title="Steps since the last checkpoint", help="Beside checkpoint.every.", lowest=0, queries=(
        Query(f"{newest('bapo_learner_step')} - {newest('bapo_checkpoint_last_step')}", "behind"),
        Query(newest("bapo_checkpoint_interval_steps"), "interval"))),
    Panel(title="Age of the last checkpoint", help="Seconds.", unit="s", lowest=0, queries=(
        Query(f"time() - {newest('bapo_checkpoint_last_success_timestamp_seconds')}", "{{run}}"),)),
    Panel(title="Disk of the run directory", help="Free and size.", unit="bytes", lowest=0, queries=(
        Query(newest("bapo_run_disk_free_bytes"), "free"), Query(newest("bapo_run_disk_size_bytes"), "size"))),
))  # fmt: skip

SYSTEM = Dashboard(
    uid="bapo-system",
    title="BAPO / System",
    help="Who waits for whom, workers, weights, verifiers, Redis, memory and disk. Generated: "
    "python -m deploy.monitoring",
    rows=(WAITS, WORKERS, AUTOSCALING, WEIGHTS, VERIFIERS, BUFFER, PROCESSES, CHECKPOINTS),
    variables=("run", "worker"),
    links=(("Run", "/d/bapo-run"), ("Compute ledger", "/d/bapo-ledger")),
)
