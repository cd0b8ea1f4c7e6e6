"""BAPO / Run: what is trained, from which buffers, how far off the policy, and with what result."""

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
    Panel(title="Oldest group of the batch", help="X1 never exceeds the limit v - 1 + slack.", lowest=0, queries=(
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
