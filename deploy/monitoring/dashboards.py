"""The three Grafana dashboards: BAPO / Run, BAPO / System, BAPO / Compute ledger."""

from __future__ import annotations

from deploy.monitoring.grafana import Dashboard, Panel, Query, Row


def newest(name: str, *labels: str) -> str:
    """A gauge that several instances of a service may show: they show the same."""
    return f"max by ({', '.join(('run', *labels))}) ({name})"


def per_minute(name: str, *labels: str) -> str:
    """How often per minute, all instances together."""
    return f"sum by ({', '.join(('run', *labels))}) (rate({name}[$__rate_interval])) * 60"


def buckets(name: str, selector: str = "") -> str:
    """What a heat map draws: observations per bucket."""
    return f"sum by (le) (increase({name}_bucket{selector}[$__rate_interval]))"


OVERVIEW = Row("Overview", (
    Panel(kind="stat", title="Step", help="Step that the learner finished last, what the buffer knows of it, and T.",
          width=3, height=5, queries=(
        Query(newest("bapo_learner_step"), "{{run}}"),
        Query(newest("bapo_run_committed_steps"), "committed of {{run}}"),
        Query(newest("bapo_run_target_steps"), "T of {{run}}"))),
    Panel(kind="stat", title="Steps per hour", help="Of the last five minutes.", width=3, height=5, decimals=1,
          queries=(Query("sum by (run) (rate(bapo_learner_steps_total[5m])) * 3600", "{{run}}"),)),
    Panel(kind="stat", title="Since the last step", help="A learner that is stuck does not move this back to 0.",
          width=3, height=5, unit="s", queries=(
        Query(f"time() - {newest('bapo_learner_last_step_timestamp_seconds')}", "{{run}}"),)),
    Panel(kind="stat", title="r_tot", help="Mean reward of all fresh responses of the last step.", width=3, height=5,
          unit="percentunit", queries=(Query(newest("bapo_reward_global_mean_ratio"), "{{run}}"),)),
    Panel(kind="stat", title="Held-out accuracy", help="Newest measurement of each split.", width=3, height=5,
          unit="percentunit", queries=(Query(newest("bapo_eval_accuracy_ratio", "split"), "{{split}}"),)),
    Panel(kind="stat", title="Batch filled", help="Groups of the last batch, as a share of B.", width=3, height=5,
          unit="percentunit", queries=(Query(newest("bapo_batch_fill_ratio"), "{{run}}"),)),
    Panel(kind="stat", title="Learner waits", help="Share of its time that the learner waits for a batch.", width=3,
          height=5, unit="percentunit", queries=(Query(
        'sum by (run) (rate(bapo_learner_phase_seconds_sum{phase="wait_batch"}[5m])) '
        '/ sum by (run) (rate(bapo_learner_phase_seconds_sum{phase="step"}[5m]))', "{{run}}"),)),
    Panel(kind="stat", title="Policy version", help="Newest version that was published.", width=3, height=5,
          queries=(Query(newest("bapo_learner_policy_version"), "{{run}}"),)),
    Panel(kind="table", title="Runs", help="What each run is.", width=16, height=5, queries=(
        Query("max by (run, preset, algorithm, model, task, engine) (bapo_run_info)"),)),
    Panel(kind="alertlist", title="Alerts", help="Those that fire now; docs/monitoring.md says what to do.",
          width=8, height=5),
))  # fmt: skip

BATCH = Row("Batch composition", (
    Panel(title="Groups of the batch", help="X1 + X2 + X3, under the capacity B.", stack=True, lowest=0, queries=(
        Query(newest("bapo_batch_groups", "origin"), "{{origin}}"), Query(newest("bapo_batch_capacity_groups"), "B")),
        lines_over=("B",)),
    Panel(title="Trained per minute", help="Groups that batches took, by origin.", stack=True, lowest=0, queries=(
        Query(per_minute("bapo_batch_trained_groups_total", "origin"), "{{origin}}"),)),
    Panel(title="Left out per minute", help="Fresh groups that trained in no batch, by reason.", stack=True, lowest=0,
          queries=(Query(per_minute("bapo_batch_filtered_groups_total", "reason") + " > 0", "{{reason}}"),)),
    Panel(title="Share of B that is filled", help="The paper has 0.7 to 1.", unit="percentunit", lowest=0, highest=1,
          width=24, height=5, queries=(Query(newest("bapo_batch_fill_ratio"), "{{run}}"),)),
))  # fmt: skip

BUFFERS = Row("Buffers", (
    Panel(title="Sizes and limits", help="Groups or prompts in each table.", lowest=0, queries=(
        Query(newest("bapo_buffer_groups", "table"), "{{table}}"),
        Query(newest("bapo_buffer_capacity_groups", "table"), "limit of {{table}}"))),
    Panel(title="In per minute", help="Entries that assemblies put into B_bad and B_high.", lowest=0, queries=(
        Query(per_minute("bapo_buffer_inserted_total", "table"), "{{table}}"),)),
    Panel(title="Out per minute", help="improved: trained as X2; solved: nothing to learn; expired: older than S "
          "steps; replaced: by a newer entry of the prompt; full: no room.", stack=True, lowest=0, queries=(
        Query(per_minute("bapo_buffer_evicted_total", "table", "reason") + " > 0", "{{table}} {{reason}}"),)),
    Panel(kind="heatmap", title="Age of reused groups", help="Steps since birth of X3 when it trains.", width=12,
          unit="short", queries=(Query(buckets("bapo_buffer_age_steps", '{table="high"}'), "{{le}}"),)),
    Panel(kind="heatmap", title="Age of hard prompts", help="Steps since birth when they are asked again.", width=12,
          unit="short", queries=(Query(buckets("bapo_buffer_age_steps", '{table="bad"}'), "{{le}}"),)),
))  # fmt: skip

DIFFICULTY = Row("Difficulty", (
    Panel(title="Fresh groups by right responses", help="How many of G were right, in the last step.", stack=True,
          lowest=0, queries=(
        Query('max by (bin) (bapo_group_accuracy_groups{purpose="fresh"})', "{{bin}} right"),)),
    Panel(title="Thresholds and r_tot", help="c1, and the window c2 to c3 of eq. 8 that follows r_tot.",
          unit="percentunit", lowest=0, highest=1, queries=(
        Query(newest("bapo_threshold_ratio", "name"), "{{name}}"),
        Query(newest("bapo_reward_global_mean_ratio"), "r_tot"))),
    Panel(title="Unsolved and rescued prompts", help="Without a right response so far; with their first one after an "
          "all-wrong group.", lowest=0, queries=(
        Query(newest("bapo_prompts_unsolved"), "unsolved"),
        Query("sum by (purpose) (bapo_prompts_rescued_total)", "rescued when {{purpose}}"))),
    Panel(title="Asked again, by right responses", help="Re-evaluated groups of the last step.", stack=True,
          lowest=0, queries=(
        Query('max by (bin) (bapo_group_accuracy_groups{purpose="reevaluate"})', "{{bin}} right"),)),
    Panel(title="Response length", help="Median and 95th percentile of fresh responses.", lowest=0, queries=(
        Query('histogram_quantile(0.5, sum by (le) (rate(bapo_rollout_response_tokens_bucket{purpose="fresh"}[5m])))',
              "median"),
        Query('histogram_quantile(0.95, sum by (le) (rate(bapo_rollout_response_tokens_bucket{purpose="fresh"}[5m])))',
              "95 %"))),
    Panel(title="Truncated per minute", help="Responses that the length limit ended.", lowest=0, queries=(
        Query(per_minute("bapo_rollout_truncated_total", "purpose"), "{{purpose}}"),)),
))  # fmt: skip

REEVALUATION = Row("Re-evaluation", (
    Panel(title="What became of hard prompts", help="Per minute: improved trains as X2, solved leaves.", stack=True,
          lowest=0, queries=(
        Query(per_minute("bapo_reevaluation_prompts_total", "outcome") + " > 0", "{{outcome}}"),)),
    Panel(title="Duration of a round", help="From its issue to its last answer: mean.", unit="s", lowest=0, queries=(
        Query("sum by (run) (rate(bapo_reevaluation_duration_seconds_sum[5m])) "
              "/ sum by (run) (rate(bapo_reevaluation_duration_seconds_count[5m]))", "mean"),)),
    Panel(title="Share of tokens", help="Of all tokens sampled for training, what re-evaluation costs.",
          unit="percentunit", lowest=0, queries=(
        Query('sum by (run) (rate(bapo_rollout_tokens_total{purpose="reevaluate"}[5m])) '
              '/ sum by (run) (rate(bapo_rollout_tokens_total{purpose=~"fresh|reevaluate"}[5m]))', "{{run}}"),)),
    Panel(title="Rounds", help="Issued so far; empty: there was no hard prompt to ask.", lowest=0, width=12, queries=(
        Query("sum by (outcome) (bapo_reevaluation_rounds_total)", "{{outcome}}"),)),
    Panel(title="Lag", help="Steps since the oldest round that is not answered.", lowest=0, width=12, queries=(
        Query(newest("bapo_reevaluation_lag_steps"), "{{run}}"),)),
))  # fmt: skip

OFF_POLICYNESS = Row("Off-policyness", (
    Panel(kind="heatmap", title="Staleness", help="Step minus policy version of the groups that train.",
          queries=(Query(buckets("bapo_learner_staleness_steps"), "{{le}}"),)),
    Panel(title="Oldest group of the batch", help="X1: at most v - 1 + max_steps_ahead.", lowest=0, queries=(
        Query(newest("bapo_learner_staleness_max_steps", "origin"), "{{origin}}"),
        Query('max by (run) (bapo_cadence_steps{name="max_staleness"})', "limit of x1"))),
    Panel(kind="heatmap", title="Importance ratio", help="pi_theta_t / alpha of some tokens of each step.",
          queries=(Query(buckets("bapo_learner_importance_ratio"), "{{le}}"),)),
    Panel(title="Total variation", help="Of pi_theta_t and alpha, per token.", unit="percentunit", lowest=0, queries=(
        Query('max by (origin) (bapo_learner_tv_distance_ratio{kind="token"})', "{{origin}}"),)),
    Panel(title="Theorem 3.2: bound", help="Estimated improvement; at or below 0 it says nothing.", queries=(
        Query("max by (origin, form) (bapo_learner_improvement_bound)", "{{origin}} {{form}}"),)),
    Panel(title="Theorem 3.2: penalties", help="K times total variation, and total variation.", queries=(
        Query("max by (origin, of) (bapo_learner_improvement_penalty)", "{{origin}} {{of}}"),)),
    Panel(title="Effective sample size", help="Share of responses that still count.", unit="percentunit", lowest=0,
          highest=1, queries=(Query('max by (origin) (bapo_learner_ess_ratio{level="sequence"})', "{{origin}}"),)),
    Panel(title="KL to alpha", help="Per response.", unit="short", lowest=0, queries=(
        Query("max by (origin, direction) (bapo_learner_kl_nats)", "{{origin}} {{direction}}"),)),
    Panel(title="Engine against learner", help="KL per token under the same weights: only groups without staleness.",
          lowest=0, queries=(Query("max by (run) (bapo_learner_mismatch_kl_nats)", "{{run}}"),)),
    Panel(title="Largest ratio of a token", help="pi_theta_t / alpha.", width=12, lowest=0, queries=(
        Query("max by (origin) (bapo_learner_importance_ratio_max)", "{{origin}}"),)),
    Panel(title="K_1, K_2, K_3", help="Stability constants of theorem 3.2.", width=12, lowest=0, queries=(
        Query("max by (origin) (bapo_learner_stability_constant)", "{{origin}}"),)),
))  # fmt: skip

OPTIMISATION = Row("Optimisation", (
    Panel(title="Loss", help="Mean over the step's mini-batches.", queries=(
        Query(newest("bapo_learner_loss"), "{{run}}"),)),
    Panel(title="Gradient norm", help="Before clipping.", lowest=0, queries=(
        Query(newest("bapo_learner_grad_norm"), "{{run}}"),)),
    Panel(title="Entropy", help="Mean over tokens, nats.", lowest=0, queries=(
        Query(newest("bapo_learner_entropy_nats"), "{{run}}"),)),
    Panel(title="Clipped tokens", help="Share of the tokens that were computed.", unit="percentunit", lowest=0,
          queries=(Query(newest("bapo_learner_clip_ratio"), "{{run}}"),)),
    Panel(title="KL of the loss", help="Per token, to what the KL term is anchored to.", queries=(
        Query(newest("bapo_learner_kl_penalty_nats"), "{{run}}"),)),
    Panel(title="Learning rate", help="Of the step.", unit="sci", lowest=0, queries=(
        Query(newest("bapo_learner_learning_rate"), "{{run}}"),)),
))  # fmt: skip

EVALUATION = Row("Evaluation", (
    Panel(title="Held-out accuracy", help="Mean reward of each split.", unit="percentunit", lowest=0, queries=(
        Query(newest("bapo_eval_accuracy_ratio", "split"), "{{split}}"),)),
    Panel(title="pass@k", help="Prompts with a right response among k.", unit="percentunit", lowest=0, queries=(
        Query(newest("bapo_eval_passk_ratio", "split", "k"), "{{split}} pass@{{k}}"),)),
    Panel(title="Version that was measured", help="The curve lies behind the learner by a measurement.", queries=(
        Query(newest("bapo_eval_policy_version", "split"), "{{split}}"),)),
))  # fmt: skip

RUN = Dashboard(
    uid="bapo-run",
    title="BAPO / Run",
    help="What is trained, from which buffers, how far off the policy, and with what result. Generated: "
    "python -m deploy.monitoring",
    rows=(OVERVIEW, BATCH, BUFFERS, DIFFICULTY, REEVALUATION, OFF_POLICYNESS, OPTIMISATION, EVALUATION),
    links=(("System", "/d/bapo-system"), ("Compute ledger", "/d/bapo-ledger")),
)


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
    Panel(title="Pushed groups per minute", help="By result.", lowest=0, queries=(
        Query(per_minute("bapo_buffer_ingested_groups_total", "result"), "{{result}}"),)),
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


TOKENS = "sum by (purpose) (bapo_rollout_tokens_total)"
BUSY = 'scalar(sum(avg_over_time(bapo_rollout_workers{state="ready"}[5m])))'
SHARE = "sum by (purpose) (rate(bapo_rollout_tokens_total[5m])) / scalar(sum(rate(bapo_rollout_tokens_total[5m])))"

SAMPLED = Row("Sampled", (
    Panel(title="Tokens sampled", help="So far, by purpose.", stack=True, lowest=0, queries=(
        Query(TOKENS, "{{purpose}}"),)),
    Panel(title="Tokens per second", help="All workers together.", stack=True, lowest=0, queries=(
        Query("sum by (purpose) (rate(bapo_rollout_tokens_total[$__rate_interval]))", "{{purpose}}"),)),
    Panel(title="Workers busy with", help="Ready workers, shared out by the tokens that they sample: "
          "its area is worker-seconds (GPU-seconds where a worker has a GPU).", stack=True, lowest=0, queries=(
        Query(f"{SHARE} * {BUSY}", "{{purpose}}"),)),
))  # fmt: skip

BECAME = Row("What became of them", (
    Panel(title="Tokens by use", help="Groups that an assembly looked at: trained, left out, or too old.", stack=True,
          lowest=0, width=12, queries=(
        Query("sum by (purpose, use) (bapo_ledger_tokens_total)", "{{purpose}} {{use}}"),)),
    Panel(title="Share that trained", help="Of the tokens of all groups that assemblies looked at.",
          unit="percentunit", lowest=0, highest=1, width=12, queries=(
        Query('sum by (run) (bapo_ledger_tokens_total{use="trained"}) / sum by (run) (bapo_ledger_tokens_total)',
              "{{run}}"),)),
    Panel(title="Cumulative rollouts", help="Responses for training (the paper's figure 9).", stack=True, lowest=0,
          width=12, queries=(Query("sum by (purpose) (bapo_ledger_responses_total)", "{{purpose}}"),)),
    Panel(title="Sampled and never looked at", help="Tokens in the buffer, on their way, or lost with a worker, a "
          "lease or a verifier.", lowest=0, width=12, queries=(
        Query('clamp_min(sum by (run) (bapo_rollout_tokens_total{purpose!="evaluate"}) '
              "- sum by (run) (bapo_ledger_tokens_total), 0)", "{{run}}"),)),
))  # fmt: skip

TRAINED = Row("Trained", (
    Panel(title="Tokens trained per second", help="Reused groups count each time.", lowest=0, width=12, queries=(
        Query("sum by (run) (rate(bapo_learner_tokens_total[$__rate_interval]))", "{{run}}"),)),
    Panel(title="Trained per sampled token", help="Above 1: reuse trains more than what is sampled.", lowest=0,
          width=12, queries=(
        Query('sum by (run) (bapo_learner_tokens_total) '
              '/ sum by (run) (bapo_rollout_tokens_total{purpose!="evaluate"})', "{{run}}"),)),
))  # fmt: skip

ASKED = Row("Asked for", (
    Panel(title="Requests per minute", help="That the scheduler gave to the buffer.", lowest=0, width=24, height=6,
          queries=(Query(per_minute("bapo_scheduler_requests_total", "purpose"), "{{purpose}}"),)),
))  # fmt: skip

LEDGER = Dashboard(
    uid="bapo-ledger",
    title="BAPO / Compute ledger",
    help="What sampling cost, by purpose, and what became of it. Counters begin at 0 when a process starts again. "
    "Generated: python -m deploy.monitoring",
    rows=(SAMPLED, BECAME, TRAINED, ASKED),
    links=(("Run", "/d/bapo-run"), ("System", "/d/bapo-system")),
)
