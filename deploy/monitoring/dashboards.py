"""Grafana dashboards in detail: BAPO / Run, BAPO / System, BAPO / Compute ledger. BAPO / Health is in `health`."""

from __future__ import annotations

from dataclasses import replace

from deploy.monitoring.grafana import Dashboard, Panel, Query, Row

UIDS = {
    "Health": "bapo-health", "Run": "bapo-run", "System": "bapo-system", "Compute ledger": "bapo-ledger",
    "Runbook": "bapo-runbook",
}  # fmt: skip


PROCESSES_UP = 'min by (run, process) (up{process!="",run=~"$run|"})'
"""Compose targets have no `run` label."""


def newest(name: str, *labels: str) -> str:
    """A gauge that every instance of a service exports with the same value."""
    return f"max by ({', '.join(('run', *labels))}) ({name})"


def per_minute(name: str, *labels: str) -> str:
    """Rate per minute, summed over instances."""
    return f"sum by ({', '.join(('run', *labels))}) (rate({name}[$__rate_interval])) * 60"


def buckets(name: str, selector: str = "") -> str:
    """Query of a heat map: observations per bucket."""
    return f"sum by (le) (increase({name}_bucket{selector}[$__rate_interval]))"


def first_open(*rows: Row) -> tuple[Row, ...]:
    """First row expanded, the others collapsed: Grafana queries a panel only once its row is expanded."""
    return (rows[0], *(replace(row, collapsed=True) for row in rows[1:]))


def links_to(*titles: str) -> tuple[tuple[str, str], ...]:
    """Links of a dashboard: Health first, the runbook last."""
    return tuple((title, f"/d/{UIDS[title]}") for title in ("Health", *titles, "Runbook"))


OVERVIEW = Row("Overview", (
    Panel(kind="stat", title="Step", help="Last step that the learner finished.",
          width=3, height=5, queries=(Query(newest("bapo_learner_step"), "{{run}}"),)),
    Panel(kind="stat", title="Progress", help="Committed steps as a share of the run's.", width=3, height=5,
          unit="percentunit", queries=(Query(
        f"{newest('bapo_run_committed_steps')} / {newest('bapo_run_target_steps')}", "{{run}}"),)),
    Panel(kind="stat", title="Steps per hour", help="Over the last five minutes.", width=3, height=5, decimals=1,
          queries=(Query("sum by (run) (rate(bapo_learner_steps_total[5m])) * 3600", "{{run}}"),)),
    Panel(kind="stat", title="Time since the last step", help="A stuck learner never resets this to 0.",
          width=3, height=5, unit="s", queries=(
        Query(f"time() - {newest('bapo_learner_last_step_timestamp_seconds')}", "{{run}}"),)),
    Panel(kind="stat", title="Mean reward (r_tot)",
          help="Mean reward of all fresh responses of the last step.", width=3, height=5,
          unit="percentunit", queries=(Query(newest("bapo_reward_global_mean_ratio"), "{{run}}"),)),
    Panel(kind="stat", title="Held-out reward", help="Latest mean reward of each split.", width=3, height=5,
          unit="percentunit", queries=(Query(newest("bapo_eval_accuracy_ratio", "split"), "{{split}}"),)),
    Panel(kind="stat", title="Batch filled", help="Groups in the last batch, as a share of B.", width=3, height=5,
          unit="percentunit", queries=(Query(newest("bapo_batch_fill_ratio"), "{{run}}"),)),
    Panel(kind="stat", title="Learner waiting", help="Share of time that the learner waits for a batch.", width=3,
          height=5, unit="percentunit", queries=(Query(
        'sum by (run) (rate(bapo_learner_phase_seconds_sum{phase="wait_batch"}[5m])) '
        '/ sum by (run) (rate(bapo_learner_phase_seconds_sum{phase="step"}[5m]))', "{{run}}"),)),
    Panel(kind="table", title="Runs", help="Preset, model and task of each run.", width=16, height=5, queries=(
        Query("max by (run, preset, algorithm, model, task, engine) (bapo_run_info)"),)),
    Panel(kind="alertlist", title="Alerts", help="Firing now; what to do: BAPO / Runbook.",
          width=8, height=5),
))  # fmt: skip

BATCH = Row("Batch composition", (
    Panel(title="Batch composition", axis="groups",
          help="X1 + X2 + X3, compared with the capacity B.", stack=True, lowest=0, queries=(
        Query(newest("bapo_batch_groups", "origin"), "{{origin}}"), Query(newest("bapo_batch_capacity_groups"), "B")),
        lines_over=("B",)),
    Panel(title="Groups trained per minute", axis="groups/min", help="By origin.", stack=True, lowest=0, queries=(
        Query(per_minute("bapo_batch_trained_groups_total", "origin"), "{{origin}}"),)),
    Panel(title="Groups filtered out per minute", axis="groups/min",
          help="Fresh groups that were not trained, by reason.", stack=True, lowest=0,
          queries=(Query(per_minute("bapo_batch_filtered_groups_total", "reason") + " > 0", "{{reason}}"),)),
    Panel(title="Batch fill ratio", help="0.7 to 1 in the paper.", unit="percentunit", lowest=0, highest=1,
          width=12, height=5, queries=(Query(newest("bapo_batch_fill_ratio"), "{{run}}"),)),
    Panel(title="Fresh groups with equal rewards", help="Share without an advantage, trained or not.",
          unit="percentunit", lowest=0, highest=1, width=12, height=5, queries=(Query(
        'sum by (run) (rate(bapo_batch_fresh_groups_total{rewards="equal"}[5m])) '
        "/ sum by (run) (rate(bapo_batch_fresh_groups_total[5m]))", "{{run}}"),)),
))  # fmt: skip

BUFFERS = Row("Buffers", (
    Panel(title="Buffer size and limit", axis="entries", help="Groups or prompts in each table.", lowest=0, queries=(
        Query(newest("bapo_buffer_groups", "table"), "{{table}}"),
        Query(newest("bapo_buffer_capacity_groups", "table"), "limit of {{table}}"))),
    Panel(title="Insertions per minute", axis="entries/min",
          help="Entries added to B_bad and B_high.", lowest=0, queries=(
        Query(per_minute("bapo_buffer_inserted_total", "table"), "{{table}}"),)),
    Panel(title="Evictions per minute", axis="entries/min",
          help="improved: trained as X2; solved: nothing to learn; expired: older than S "
          "steps; replaced: by a newer entry of the prompt; full: no room.", stack=True, lowest=0, queries=(
        Query(per_minute("bapo_buffer_evicted_total", "table", "reason") + " > 0", "{{table}} {{reason}}"),)),
    Panel(kind="heatmap", title="Age of reused groups", help="Steps from sampling to training of X3.", width=12,
          unit="short", queries=(Query(buckets("bapo_buffer_age_steps", '{table="high"}'), "{{le}}"),)),
    Panel(kind="heatmap", title="Age of hard prompts", help="Steps from entering B_bad to re-evaluation.", width=12,
          unit="short", queries=(Query(buckets("bapo_buffer_age_steps", '{table="bad"}'), "{{le}}"),)),
))  # fmt: skip

DIFFICULTY = Row("Difficulty", (
    Panel(title="Fresh groups by correct responses", axis="groups",
          help="Correct responses out of G, in the last step.", stack=True,
          lowest=0, queries=(
        Query('max by (bin) (bapo_group_accuracy_groups{purpose="fresh"})', "{{bin}} correct"),)),
    Panel(title="Thresholds and r_tot", help="r_tot (eq. 8), c1 and the window c2 to c3, where they decide.",
          unit="percentunit", lowest=0, highest=1, queries=(
        Query(newest("bapo_threshold_ratio", "name"), "{{name}}"),
        Query(newest("bapo_reward_global_mean_ratio"), "r_tot"))),
    Panel(title="Components of the reward", help="Mean of each of several rewards over the last step's fresh groups.",
          without_data="task.reward is one function", unit="percentunit", lowest=0, highest=1,
          queries=(Query(newest("bapo_learner_reward_part_ratio", "reward"), "{{reward}}"),)),
    Panel(title="Unsolved and newly solved prompts", axis="prompts",
          help="Without a correct response yet; with their first one after "
          "an all-incorrect group.", lowest=0, queries=(
        Query(newest("bapo_prompts_unsolved"), "unsolved"),
        Query("sum by (purpose) (bapo_prompts_rescued_total)", "newly solved, {{purpose}}"))),
    Panel(title="Re-evaluated groups by correct responses", axis="groups",
          help="Re-evaluated groups of the last step.", stack=True,
          lowest=0, queries=(
        Query('max by (bin) (bapo_group_accuracy_groups{purpose="reevaluate"})', "{{bin}} correct"),)),
    Panel(title="Response length", axis="tokens",
          help="Median and 95th percentile of fresh responses.", lowest=0, queries=(
        Query('histogram_quantile(0.5, sum by (le) (rate(bapo_rollout_response_tokens_bucket{purpose="fresh"}[5m])))',
              "median"),
        Query('histogram_quantile(0.95, sum by (le) (rate(bapo_rollout_response_tokens_bucket{purpose="fresh"}[5m])))',
              "95 %"))),
    Panel(title="Truncated responses per minute", axis="responses/min",
          help="Responses truncated at the length limit.", lowest=0, queries=(
        Query(per_minute("bapo_rollout_truncated_total", "purpose"), "{{purpose}}"),)),
))  # fmt: skip

EPISODES = Row("Episodes", (
    Panel(title="Turns per episode", axis="turns", help="Mean over the trained episodes of agents.", lowest=0,
          width=12, queries=(Query(newest("bapo_learner_episode_turns"), "{{run}}"),)),
    Panel(title="Tool calls per episode", axis="calls", help="In the hermes format; by tool on the run's own page.",
          lowest=0, width=12, queries=(Query(newest("bapo_learner_episode_tool_calls"), "{{run}}"),)),
    Panel(title="Context per episode", axis="tokens", help="Tokens that are read between turns and never trained.",
          lowest=0, width=12, queries=(Query(newest("bapo_learner_episode_context_tokens"), "{{run}}"),)),
    Panel(title="Episodes with a fork", help="Share whose history was changed.", unit="percentunit", lowest=0,
          highest=1, width=12, queries=(Query(newest("bapo_learner_episode_forked_ratio"), "{{run}}"),)),
    Panel(title="Tokens too old to train", help="Share, with rollout.stale_tokens = mask.", unit="percentunit",
          lowest=0, highest=1, width=12, queries=(Query(newest("bapo_learner_episode_masked_ratio"), "{{run}}"),)),
))  # fmt: skip

REEVALUATION = Row("Re-evaluation", (
    Panel(title="Outcome of re-evaluation per minute", axis="prompts/min",
          help="improved: trains as X2; solved: leaves B_bad.", stack=True,
          lowest=0, queries=(
        Query(per_minute("bapo_reevaluation_prompts_total", "outcome") + " > 0", "{{outcome}}"),)),
    Panel(title="Duration of a re-evaluation round",
          help="Mean time from request to last result.", unit="s", lowest=0, queries=(
        Query("sum by (run) (rate(bapo_reevaluation_duration_seconds_sum[5m])) "
              "/ sum by (run) (rate(bapo_reevaluation_duration_seconds_count[5m]))", "mean"),)),
    Panel(title="Cost of re-evaluation", help="Share of all tokens sampled for training.",
          unit="percentunit", lowest=0, queries=(
        Query('sum by (run) (rate(bapo_rollout_tokens_total{purpose="reevaluate"}[5m])) '
              '/ sum by (run) (rate(bapo_rollout_tokens_total{purpose=~"fresh|reevaluate"}[5m]))', "{{run}}"),)),
    Panel(title="Re-evaluation rounds", axis="rounds",
          help="Total; empty: B_bad had no prompt.", lowest=0, width=12, queries=(
        Query("sum by (outcome) (bapo_reevaluation_rounds_total)", "{{outcome}}"),)),
    Panel(title="Lag of re-evaluation", axis="steps",
          help="Steps since the oldest pending round.", lowest=0, soft_highest=5, width=12, queries=(
        Query(newest("bapo_reevaluation_lag_steps"), "{{run}}"),)),
))  # fmt: skip

OFF_POLICYNESS = Row("Off-policy drift", (
    Panel(kind="heatmap", title="Staleness", help="Step minus policy version of the trained groups.",
          queries=(Query(buckets("bapo_learner_staleness_steps"), "{{le}}"),)),
    Panel(title="Maximum staleness of the batch", axis="steps",
          help="In steps. X1: at most v - 1 + max_steps_ahead.", lowest=0,
          soft_highest=5, lines_over=("limit of x1",), queries=(
        Query(newest("bapo_learner_staleness_max_steps", "origin"), "{{origin}}"),
        Query('max by (run) (bapo_cadence_steps{name="max_staleness"})', "limit of x1"))),
    Panel(kind="heatmap", title="Importance ratio", help="pi_theta_t / alpha for a sample of each step's tokens.",
          queries=(Query(buckets("bapo_learner_importance_ratio"), "{{le}}"),)),
    Panel(title="Total variation", help="pi_theta_t against alpha, per token.", unit="percentunit", lowest=0, queries=(
        Query('max by (origin) (bapo_learner_tv_distance_ratio{kind="token"})', "{{origin}}"),)),
    Panel(title="Theorem 3.2: bound", axis="reward", help="Estimated improvement; vacuous at or below 0.", queries=(
        Query("max by (origin, form) (bapo_learner_improvement_bound)", "{{origin}} {{form}}"),)),
    Panel(title="Theorem 3.2: penalties", axis="reward",
          help="K times total variation, and total variation itself.", queries=(
        Query("max by (origin, of) (bapo_learner_improvement_penalty)", "{{origin}} {{of}}"),)),
    Panel(title="Effective sample size", help="As a share of the responses.", unit="percentunit", lowest=0,
          highest=1, queries=(Query('max by (origin) (bapo_learner_ess_ratio{level="sequence"})', "{{origin}}"),)),
    Panel(title="KL to alpha", axis="nats per response", help="Per response.", unit="short", lowest=0, queries=(
        Query("max by (origin, direction) (bapo_learner_kl_nats)", "{{origin}} {{direction}}"),)),
    Panel(title="Engine and learner mismatch", axis="nats per token",
          help="KL per token, same weights: only groups with staleness 0.",
          lowest=0, queries=(Query("max by (run) (bapo_learner_mismatch_kl_nats)", "{{run}}"),)),
    Panel(title="Largest ratio of a token", axis="ratio", help="pi_theta_t / alpha.", width=12, lowest=0, queries=(
        Query("max by (origin) (bapo_learner_importance_ratio_max)", "{{origin}}"),)),
    Panel(title="K_1, K_2, K_3", axis="constant",
          help="Stability constants of theorem 3.2.", width=12, lowest=0, queries=(
        Query("max by (origin) (bapo_learner_stability_constant)", "{{origin}}"),)),
))  # fmt: skip

OPTIMISATION = Row("Optimization", (
    Panel(title="Loss", axis="loss", help="Mean over the step's mini-batches.", queries=(
        Query(newest("bapo_learner_loss"), "{{run}}"),)),
    Panel(title="Gradient norm", axis="L2 norm", help="Before clipping.", lowest=0, queries=(
        Query(newest("bapo_learner_grad_norm"), "{{run}}"),)),
    Panel(title="Entropy", axis="nats per token", help="Mean over tokens, nats.", lowest=0, queries=(
        Query(newest("bapo_learner_entropy_nats"), "{{run}}"),)),
    Panel(title="Clipped tokens", help="Share of trained tokens that were clipped.", unit="percentunit", lowest=0,
          queries=(Query(newest("bapo_learner_clip_ratio"), "{{run}}"),)),
    Panel(title="KL of the loss", axis="nats per token",
          help="Per token, to the reference policy of the KL term.", queries=(
        Query(newest("bapo_learner_kl_penalty_nats"), "{{run}}"),)),
    Panel(title="Distance to the teacher", axis="nats per token",
          help="Distillation: reverse KL of the policy that sampled to the teacher.", queries=(
        Query(newest("bapo_learner_teacher_kl_nats"), "{{run}}"),)),
    Panel(title="Learning rate", axis="learning rate", help="At each step.", unit="sci", lowest=0, queries=(
        Query(newest("bapo_learner_learning_rate"), "{{run}}"),)),
))  # fmt: skip

EVALUATION = Row("Evaluation", (
    Panel(title="Held-out mean reward", help="The accuracy for rewards 0 and 1.", unit="percentunit",
          lowest=0, queries=(
        Query(newest("bapo_eval_accuracy_ratio", "split"), "{{split}}"),)),
    Panel(title="pass@k", help="Prompts with a reward of 1 among k.", unit="percentunit", lowest=0, queries=(
        Query(newest("bapo_eval_passk_ratio", "split", "k"), "{{split}} pass@{{k}}"),)),
    Panel(title="Evaluated version", axis="policy version",
          help="Policy version of the latest evaluation.", queries=(
        Query(newest("bapo_eval_policy_version", "split"), "{{split}}"),)),
))  # fmt: skip

RUN = Dashboard(
    uid="bapo-run",
    title="BAPO / Run",
    help="Batch composition, buffers, off-policy drift, optimization and results. Generated: "
    "python -m deploy.monitoring",
    rows=first_open(
        OVERVIEW, BATCH, BUFFERS, DIFFICULTY, EPISODES, REEVALUATION, OFF_POLICYNESS, OPTIMISATION, EVALUATION
    ),
    links=links_to("System", "Compute ledger"),
)


WAITS = Row("Bottleneck", (
    Panel(title="Step time by phase", help="Mean seconds of each phase of a step. wait_batch: workers are the "
          "bottleneck; update: the learner is.", unit="s", stack=True, lowest=0, queries=(Query(
        'sum by (phase) (rate(bapo_learner_phase_seconds_sum{phase!="step"}[5m])) '
        "/ scalar(sum(rate(bapo_learner_steps_total[5m])))", "{{phase}}"),)),
    Panel(title="GPU time by phase", help="Mean seconds of rank 0's GPU. Step time by phase ends a phase when the "
          "host has queued its work.", unit="s", stack=True, lowest=0, queries=(Query(
        "sum by (phase) (rate(bapo_learner_phase_gpu_seconds_sum[5m])) "
        "/ scalar(sum(rate(bapo_learner_steps_total[5m])))", "{{phase}}"),)),
    Panel(title="Model FLOPs utilization", help="Useful FLOPs over the GPU's bfloat16 peak during prox and update; "
          "recomputed activations and proximal log-probs do not count.", unit="percentunit", lowest=0, queries=(
        Query(newest("bapo_learner_mfu_ratio"), "{{run}}"),
        Query(newest("bapo_learner_update_mfu_ratio"), "{{run}} update alone"),)),
    Panel(title="Requests", axis="requests",
          help="queued: workers are busy; leased: they are being sampled.", lowest=0,
          queries=(Query(newest("bapo_buffer_requests", "purpose", "state"), "{{purpose}} {{state}}"),)),
    Panel(title="Time without progress", help="Seconds since the run last made progress.", unit="s", lowest=0,
          soft_highest=60, queries=(Query(newest("bapo_stalled_seconds"), "{{run}}"),)),
))  # fmt: skip

WORKERS = Row("Rollout workers", (
    Panel(title="Policy version per worker", axis="policy version",
          help="Compared with the learner's latest version.", queries=(
        Query("max by (worker) (bapo_rollout_policy_version)", "{{worker}}"),
        Query(newest("bapo_learner_policy_version"), "published"))),
    Panel(title="Groups in flight", axis="groups", help="Groups being sampled or graded.", lowest=0, queries=(
        Query("max by (worker) (bapo_rollout_inflight_groups)", "{{worker}}"),)),
    Panel(title="Tokens per second per worker", axis="tokens/s", help="Over 10 s.", lowest=0, stack=True, queries=(
        Query("max by (worker) (bapo_rollout_worker_tokens_per_second)", "{{worker}}"),)),
    Panel(title="Workers", axis="workers", help="By state.", lowest=0, stack=True, queries=(
        Query("sum by (state) (bapo_rollout_workers)", "{{state}}"),)),
    Panel(title="Seconds per group", help="From claim to last token: median and 95th percentile.", unit="s", lowest=0,
          queries=tuple(Query(
        f"histogram_quantile({share}, sum by (le, purpose) (rate(bapo_rollout_group_seconds_bucket[5m])))",
        f"{{{{purpose}}}} {word}") for share, word in ((0.5, "median"), (0.95, "95 %")))),
    Panel(title="Groups per minute", axis="groups/min", help="By result of the push.", lowest=0, queries=(
        Query(per_minute("bapo_rollout_groups_total", "purpose", "outcome"), "{{purpose}} {{outcome}}"),)),
    Panel(title="Responses in the engine", axis="responses",
          help="running: in the current batch; waiting: no room in the cache.",
          lowest=0, width=12, queries=(
        Query("max by (worker, state) (bapo_rollout_engine_responses)", "{{worker}} {{state}}"),)),
    Panel(title="KV cache usage", help="Near 1 with waiting responses: fewer fit than "
          "max_groups_in_flight allows.", unit="percentunit", lowest=0, highest=1, width=12, queries=(
        Query("max by (worker) (bapo_rollout_engine_kv_cache_ratio)", "{{worker}}"),)),
    Panel(kind="state-timeline", title="Workers sampling", help="State of each worker over time.", width=12, height=5,
          states=("not sampling", "sampling"), queries=(
        Query("max by (worker) (bapo_rollout_worker_up)", "{{worker}}"),)),
    Panel(title="Worker restarts", axis="restarts", help="Total.", lowest=0, width=12, height=5, queries=(
        Query("sum by (run) (bapo_rollout_worker_restarts_total)", "{{run}}"),)),
))  # fmt: skip

AUTOSCALING = Row("Autoscaling", tuple(replace(panel, without_data="autoscaling.actuator is off") for panel in (
    Panel(title="Workers: desired, needed, ready", axis="workers",
          help="Target, number implied by the rates, and actual number.",
          lowest=0, queries=(
        Query("max by (run) (bapo_rollout_desired_workers)", "desired"),
        Query("max by (run) (bapo_rollout_needed_workers)", "needed"),
        Query('sum by (run) (bapo_rollout_workers{state="ready"})', "ready"))),
    Panel(kind="state-timeline", title="Scaling reason", help="Reason for the current target.",
          state_colors=("transparent", "blue"), queries=(
        Query("max by (reason) (bapo_rollout_scaling_reason)", "{{reason}}"),)),
    Panel(title="Idle shares", help="learner: time without a batch; workers: share of unused capacity.",
          unit="percentunit", lowest=0, highest=1, queries=(
        Query("max by (run) (bapo_rollout_learner_wait_ratio)", "learner"),
        Query("max by (run) (bapo_rollout_idle_ratio)", "workers"))),
    Panel(title="Fresh groups per second", axis="groups/s",
          help="Consumed by a learner that never waits; produced by one busy worker.",
          lowest=0, queries=(
        Query("max by (run) (bapo_rollout_consume_rate)", "learner"),
        Query("max by (run) (bapo_rollout_produce_rate)", "one worker"))),
    Panel(title="Batches ready", axis="batches",
          help="Fresh groups waiting for the learner, divided by B.", lowest=0, queries=(
        Query("max by (run) (bapo_rollout_ready_batches)", "{{run}}"),)),
    Panel(title="Worker lag", axis="steps",
          help="Versions by which the oldest ready worker lags, and the share of pushes dropped as stale.",
          lowest=0, soft_highest=5, queries=(
        Query("max by (run) (bapo_rollout_version_lag_steps)", "lag in steps"),
        Query("max by (run) (bapo_rollout_stale_ratio)", "share dropped as stale"))),
)))  # fmt: skip

WEIGHTS = Row("Weight updates", (
    Panel(title="Duration by phase", help="gather, write, send: learner; fleet: all workers, part of send.", unit="s",
          lowest=0, queries=(Query("sum by (phase) (rate(bapo_sync_duration_seconds_sum[5m])) "
                                   "/ sum by (phase) (rate(bapo_sync_duration_seconds_count[5m]))", "{{phase}}"),)),
    Panel(title="Bytes per second", help="Weights loaded by workers.", unit="Bps", lowest=0, queries=(
        Query("sum by (run) (rate(bapo_sync_bytes_total[$__rate_interval]))", "{{run}}"),)),
    Panel(title="Failures", axis="failed updates",
          help="Total of workers that failed to load an update; each is replaced. Undecided: checks that could not "
               "tell new weights from old ones, because the step was smaller than roundings.", lowest=0, queries=(
        Query("sum by (run) (bapo_sync_failures_total)", "{{run}}"),
        Query("sum by (check) (bapo_sync_undecided_total)", "undecided: {{check}}"))),
))  # fmt: skip

VERIFIERS = Row("Reward functions", (
    Panel(title="Graded responses per minute", axis="responses/min",
          help="error, timeout and killed are never counted as incorrect.",
          stack=True, lowest=0, queries=(
        Query(per_minute("bapo_verifier_results_total", "outcome") + " > 0", "{{outcome}}"),)),
    Panel(title="Seconds per group", help="Median and 95th percentile.", unit="s", lowest=0, queries=tuple(Query(
        f"histogram_quantile({share}, sum by (le, task) (rate(bapo_verifier_seconds_bucket[5m])))",
        f"{{{{task}}}} {word}") for share, word in ((0.5, "median"), (0.95, "95 %")))),
    Panel(title="Failed groups", axis="groups", help="Total by reason; each is resampled up to a limit.",
          lowest=0, queries=(
        Query('sum by (reason) (bapo_buffer_failed_groups_total) or label_replace(vector(0), "reason", "none", "", "")',
              "{{reason}}"),)),
))  # fmt: skip

AGENTS = Row("Agents", tuple(replace(panel, without_data="the run has no agents") for panel in (
    Panel(title="Episodes", axis="episodes", help="open: an agent has it; waiting: for an agent.", lowest=0, stack=True,
          queries=(Query("sum by (state) (bapo_episodes)", "{{state}}"),)),
    Panel(title="Episodes and calls per minute", axis="1/min",
          help="turn: calls of the model; fork: calls whose history was changed, which costs compute.", lowest=0,
          queries=(Query(per_minute("bapo_episode_events_total", "event"), "{{event}}"),)),
    Panel(title="Attempts without a reward", axis="attempts/min",
          help="By reason; each begins again, a limited number of times, and none is a reward of 0.", lowest=0,
          queries=(Query(per_minute("bapo_episode_failures_total", "reason"), "{{reason}}"),)),
    Panel(title="Seconds per call", help="95th percentile: in the engine, and until the record is durable.", unit="s",
          lowest=0, queries=(Query("histogram_quantile(0.95, sum by (le, phase) "
                                   "(rate(bapo_episode_call_seconds_bucket[5m])))", "{{phase}}"),)),
    Panel(title="Oldest open episode", help="Time since it was opened.", unit="s", lowest=0, queries=(
        Query("max by (run) (bapo_episode_oldest_seconds)", "{{run}}"),)),
)))  # fmt: skip

BUFFER = Row("Buffer API and Redis", (
    Panel(title="Calls per second", help="By operation.", unit="reqps", lowest=0, queries=(
        Query("sum by (operation) (rate(bapo_buffer_operation_seconds_count[$__rate_interval])) > 0",
              "{{operation}}"),)),
    Panel(title="95th percentile of a call",
          help="By operation, without long-polling calls.", unit="s", lowest=0,
          queries=(Query("histogram_quantile(0.95, sum by (operation, le) "
                         "(rate(bapo_buffer_operation_seconds_bucket[5m]))) > 0", "{{operation}}"),)),
    Panel(title="Pushed groups per minute", axis="groups/min", help="By result.", lowest=0, queries=(
        Query(per_minute("bapo_buffer_ingested_groups_total", "result"), "{{result}}"),)),
    Panel(title="Redis memory", help="Redis in total, and the groups in it.", unit="bytes", lowest=0, queries=(
        Query(newest("bapo_buffer_redis_memory_bytes"), "used"),
        Query(newest("bapo_buffer_redis_memory_limit_bytes"), "maxmemory"),
        Query(newest("bapo_buffer_bytes"), "groups"))),
    Panel(kind="state-timeline", title="Redis state", help="persistent: acknowledged groups survive a crash of Redis.",
          queries=(
        Query("min by (run) (bapo_buffer_redis_up)", "reachable"),
        Query("min by (run) (bapo_buffer_redis_persistent)", "persistent"))),
    Panel(title="Errors", axis="errors",
          help="Total of failed Redis calls and rejected requests.", lowest=0, queries=(
        Query("sum by (run) (bapo_buffer_redis_errors_total)", "redis"),
        Query("sum by (reason) (bapo_refused_requests_total) > 0", "refused: {{reason}}"))),
))  # fmt: skip

PROCESSES = Row("Processes", (
    Panel(kind="state-timeline", title="Processes up", help="Whether Prometheus can scrape each instance.",
          states=("down", "up"), queries=(
        Query(PROCESSES_UP, "{{process}}"),)),
    Panel(title="Memory", help="Resident memory per process; workers are separate processes.", unit="bytes",
          lowest=0, queries=(
        Query("max by (process) (process_resident_memory_bytes)", "{{process}}"),
        Query("max by (worker) (bapo_rollout_worker_memory_bytes)", "{{worker}}"),
        Query("max by (kind) (bapo_learner_peak_memory_bytes)", "learner, peak {{kind}}"))),
    Panel(title="CPU", axis="cores", help="Cores used by each process, without workers.", lowest=0, queries=(
        Query("max by (process) (rate(process_cpu_seconds_total[1m]))", "{{process}}"),)),
    Panel(kind="table", title="Versions", help="BAPO version of each process.", width=24, height=6, queries=(
        Query("max by (run, process, version, commit) (bapo_build_info)"),)),
))  # fmt: skip

CHECKPOINTS = Row("Checkpoints and disk", (
    Panel(title="Steps since the last checkpoint", axis="steps",
          help="Compared with checkpoint.every.", lowest=0, queries=(
        Query(f"{newest('bapo_learner_step')} - {newest('bapo_checkpoint_last_step')}", "steps"),
        Query(newest("bapo_checkpoint_interval_steps"), "interval"))),
    Panel(title="Age of the last checkpoint", help="Seconds.", unit="s", lowest=0, queries=(
        Query(f"time() - {newest('bapo_checkpoint_last_success_timestamp_seconds')}", "{{run}}"),)),
    Panel(title="Disk of the run directory", help="Free and size.", unit="bytes", lowest=0, queries=(
        Query(newest("bapo_run_disk_free_bytes"), "free"), Query(newest("bapo_run_disk_size_bytes"), "size"))),
))  # fmt: skip

SYSTEM = Dashboard(
    uid="bapo-system",
    title="BAPO / System",
    help="Bottleneck, workers, weights, reward functions, Redis, memory and disk. Generated: "
    "python -m deploy.monitoring",
    rows=first_open(WAITS, WORKERS, AUTOSCALING, WEIGHTS, VERIFIERS, AGENTS, BUFFER, PROCESSES, CHECKPOINTS),
    variables=("run", "worker"),
    links=links_to("Run", "Compute ledger"),
)


TOKENS = "sum by (purpose) (bapo_rollout_tokens_total)"
BUSY = 'scalar(sum(avg_over_time(bapo_rollout_workers{state="ready"}[5m])))'
SHARE = "sum by (purpose) (rate(bapo_rollout_tokens_total[5m])) / scalar(sum(rate(bapo_rollout_tokens_total[5m])))"

SAMPLED = Row("Sampled", (
    Panel(title="Tokens sampled", axis="tokens", help="Total by purpose.", stack=True, lowest=0, queries=(
        Query(TOKENS, "{{purpose}}"),)),
    Panel(title="Tokens per second", axis="tokens/s", help="Sum over workers.", stack=True, lowest=0, queries=(
        Query("sum by (purpose) (rate(bapo_rollout_tokens_total[$__rate_interval]))", "{{purpose}}"),)),
    Panel(title="Workers by purpose", axis="workers", help="Ready workers, divided by the tokens that they sample: "
          "its area is worker-seconds (GPU-seconds where a worker has a GPU).", stack=True, lowest=0, queries=(
        Query(f"{SHARE} * {BUSY}", "{{purpose}}"),)),
))  # fmt: skip

BECAME = Row("Outcome", (
    Panel(title="Tokens by use", axis="tokens",
          help="Groups read by batch assembly: trained, filtered out, or stale.", stack=True,
          lowest=0, width=12, queries=(
        Query("sum by (purpose, use) (bapo_ledger_tokens_total)", "{{purpose}} {{use}}"),)),
    Panel(title="Share that trained", help="As a share of the tokens of all groups read by batch assembly.",
          unit="percentunit", lowest=0, highest=1, width=12, queries=(
        Query('sum by (run) (bapo_ledger_tokens_total{use="trained"}) / sum by (run) (bapo_ledger_tokens_total)',
              "{{run}}"),)),
    Panel(title="Cumulative rollouts", axis="responses",
          help="Responses sampled for training (the paper's figure 9).", stack=True, lowest=0,
          width=12, queries=(Query("sum by (purpose) (bapo_ledger_responses_total)", "{{purpose}}"),)),
    Panel(title="Sampled and not yet read", axis="tokens",
          help="Tokens in the buffer, on their way, or lost with a worker, a "
          "lease or a verifier.", lowest=0, width=12, queries=(
        Query('clamp_min(sum by (run) (bapo_rollout_tokens_total{purpose!="evaluate"}) '
              "- sum by (run) (bapo_ledger_tokens_total), 0)", "{{run}}"),)),
))  # fmt: skip

TRAINED = Row("Trained", (
    Panel(title="Tokens trained per second", axis="tokens/s",
          help="Reused groups are counted each time.", lowest=0, width=12, queries=(
        Query("sum by (run) (rate(bapo_learner_tokens_total[$__rate_interval]))", "{{run}}"),)),
    Panel(title="Trained per sampled token", axis="ratio",
          help="Above 1: more tokens are trained than sampled, because of reuse.", lowest=0,
          width=12, queries=(
        Query('sum by (run) (bapo_learner_tokens_total) '
              '/ sum by (run) (bapo_rollout_tokens_total{purpose!="evaluate"})', "{{run}}"),)),
))  # fmt: skip

ASKED = Row("Requested", (
    Panel(title="Requests per minute", axis="requests/min",
          help="Created by the scheduler.", lowest=0, width=24, height=6,
          queries=(Query(per_minute("bapo_scheduler_requests_total", "purpose"), "{{purpose}}"),)),
))  # fmt: skip

LEDGER = Dashboard(
    uid="bapo-ledger",
    title="BAPO / Compute ledger",
    help="Sampling cost by purpose, and how it was used. Counters reset when a process restarts. "
    "Generated: python -m deploy.monitoring",
    rows=first_open(SAMPLED, BECAME, TRAINED, ASKED),
    links=links_to("Run", "System"),
)
