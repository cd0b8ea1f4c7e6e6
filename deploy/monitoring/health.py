"""BAPO / Health: twelve panels that show whether a run learns and what blocks it; and BAPO / Runbook, what to do.

The panels of every dashboard link to the runbook's entries of the alerts that read the same series.
"""

from __future__ import annotations

import re
from dataclasses import replace

from deploy.monitoring.alert import Alert, Clock
from deploy.monitoring.alerts import ALERTS
from deploy.monitoring.dashboards import LEDGER, PROCESSES_UP, RUN, SYSTEM, UIDS, newest, per_minute
from deploy.monitoring.grafana import Dashboard, Panel, Query, Row

RUNBOOK_HEIGHT = 5

LEARNING = Row("Learning", (
    Panel(title="Mean reward (r_tot)", help="Over a step's fresh responses.", unit="percentunit", lowest=0, width=6,
          queries=(Query(newest("bapo_reward_global_mean_ratio"), "{{run}}"),)),
    Panel(title="Held-out mean reward", help="Mean reward of each split; step 0 is the base model.", unit="percentunit",
          lowest=0, width=6, queries=(Query(newest("bapo_eval_accuracy_ratio", "split"), "{{split}}"),)),
    Panel(title="Entropy", help="Mean over tokens. A fast drop towards 0: responses are losing diversity.", lowest=0,
          width=6, axis="nats per token", queries=(Query(newest("bapo_learner_entropy_nats"), "{{run}}"),)),
    Panel(title="Batch composition", help="X1 fresh, X2 re-evaluated, X3 reused; B is the capacity.", stack=True,
          lowest=0, width=6, axis="groups", lines_over=("B",), queries=(
        Query(newest("bapo_batch_groups", "origin"), "{{origin}}"), Query(newest("bapo_batch_capacity_groups"), "B"))),
))  # fmt: skip

THROUGHPUT = Row("Throughput and bottleneck", (
    Panel(title="Tokens per second", help="Sampled by all workers; trained by the learner, reused groups included.",
          lowest=0, width=6, axis="tokens/s", queries=(
        Query("sum by (run) (rate(bapo_rollout_tokens_total[1m]))", "sampled"),
        Query("sum by (run) (rate(bapo_learner_tokens_total[1m]))", "trained"))),
    Panel(title="Bottleneck: share of step time", help="wait_batch: the learner waits for a batch, so the workers are "
          "the bottleneck; update and prox: the learner is.",
          unit="percentunit", stack=True, lowest=0, highest=1, width=6, queries=(Query(
        'sum by (phase) (rate(bapo_learner_phase_seconds_sum{phase!="step"}[5m])) '
        '/ scalar(sum(rate(bapo_learner_phase_seconds_sum{phase!="step"}[5m])))', "{{phase}}"),)),
    Panel(title="Maximum staleness of the batch",
          help="In steps, by origin; the limit holds for X1.", lowest=0, width=6,
          soft_highest=5, lines_over=("limit of x1",), axis="steps", queries=(
        Query(newest("bapo_learner_staleness_max_steps", "origin"), "{{origin}}"),
        Query('max by (run) (bapo_cadence_steps{name="max_staleness"})', "limit of x1"))),
    Panel(title="Time without progress", help="Seconds since the run last made progress.", unit="s", lowest=0, width=6,
          soft_highest=60, queries=(Query(newest("bapo_stalled_seconds"), "{{run}}"),)),
))  # fmt: skip

FAILURES = Row("Failures and limits", (
    Panel(kind="state-timeline", title="Processes up", help="Whether Prometheus can scrape each instance.", width=6,
          states=("down", "up"), queries=(Query(PROCESSES_UP, "{{process}}"),)),
    Panel(title="Failures per minute", help="Responses that were not graded, workers that restarted or failed to load "
          "new weights.", lowest=0, width=6, axis="per minute", queries=(
        Query(per_minute('bapo_verifier_results_total{outcome=~"error|timeout|killed"}', "outcome"),
              "reward {{outcome}}"),
        Query(per_minute("bapo_rollout_worker_restarts_total"), "worker restarts"),
        Query(per_minute("bapo_sync_failures_total"), "failed weight updates"))),
    Panel(title="Memory and disk used", help="Redis: share of maxmemory; from 95 % fresh groups are rejected. Disk: of "
          "the run directory.", unit="percentunit", lowest=0, highest=1, width=6, queries=(
        Query(f"{newest('bapo_buffer_redis_memory_bytes')} / {newest('bapo_buffer_redis_memory_limit_bytes')}",
              "redis"),
        Query(f"1 - {newest('bapo_run_disk_free_bytes')} / {newest('bapo_run_disk_size_bytes')}", "disk"))),
    Panel(kind="alertlist", title="Alerts", help="Firing now; what to do: BAPO / Runbook.", width=6),
))  # fmt: skip


def watched(alert: Alert) -> str:
    """Series that an alert evaluates: the first in its rule."""
    return _series(alert.expr(Clock()))[0]


def _series(expr: str) -> list[str]:
    return [match[0] for match in re.finditer(r"\b(bapo_[a-z0-9_]+|up)\b", expr)]


def runbook_url(alert: Alert) -> str:
    """The alert's panel of BAPO / Runbook."""
    return f"/d/{UIDS['Runbook']}?viewPanel={ALERTS.index(alert) + 2}"  # panel 1 is the row


def with_runbooks(dashboard: Dashboard) -> Dashboard:
    """The dashboard whose panels link to the alerts that read their series."""

    def linked(panel: Panel) -> Panel:
        read = {name for query in panel.queries for name in _series(query.expr)}
        found = [alert for alert in ALERTS if watched(alert) in read]
        return replace(panel, runbooks=tuple((f"Runbook: {alert.full_name}", runbook_url(alert)) for alert in found))

    rows = tuple(replace(row, panels=tuple(map(linked, row.panels))) for row in dashboard.rows)
    return replace(dashboard, rows=rows)


HEALTH = Dashboard(
    uid=UIDS["Health"],
    title="BAPO / Health",
    help="Whether the run learns, how fast, what limits it, and what failed. Generated: python -m deploy.monitoring",
    rows=(LEARNING, THROUGHPUT, FAILURES),
    links=tuple((title, f"/d/{uid}") for title, uid in UIDS.items() if title != "Health"),
)
RUNBOOK = Dashboard(
    uid=UIDS["Runbook"],
    title="BAPO / Runbook",
    help="What each alert means and what to do. Generated: python -m deploy.monitoring",
    rows=(Row("Alerts", tuple(
        Panel(kind="text", title=alert.full_name, help=alert.summary, width=12, height=RUNBOOK_HEIGHT,
              text=f"**{alert.severity}.** {alert.summary}\n\n{alert.runbook}")
        for alert in ALERTS)),),
    variables=(),
    links=tuple((title, f"/d/{uid}") for title, uid in UIDS.items() if title != "Runbook"),
)  # fmt: skip

DASHBOARDS = {
    "health": with_runbooks(HEALTH),
    "run": with_runbooks(RUN),
    "system": with_runbooks(SYSTEM),
    "compute-ledger": with_runbooks(LEDGER),
    "runbook": RUNBOOK,
}
"""File name -> dashboard."""
