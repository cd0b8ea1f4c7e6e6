"""BAPO / Compute ledger: what sampling cost, by purpose, and what became of it."""

from __future__ import annotations

from deploy.monitoring.grafana import Dashboard, Panel, Query, Row
from deploy.monitoring.run import per_minute

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
