"""The generated parts of the docs: the table of metrics, and the runbook of alerts."""

from __future__ import annotations

from collections.abc import Sequence

from bapo.runtime.metrics.metric import Metric, Process
from bapo.runtime.metrics.registry import METRICS, metrics_of
from deploy.monitoring.alert import Alert
from deploy.monitoring.alerts import ALERTS

HEAD = """\
# Metrics

Generated from `bapo/runtime/metrics` by `python -m deploy.monitoring`: do not edit. How to collect them:
[monitoring.md](monitoring.md).

* Every series carries the label `run`. What a process does not know is NaN or has no series; 0 means that there were
  none.
* Prometheus adds `process` (a name below) and `instance`. Each process also shows the standard `process_*` series.
* Label values in the table are complete; a label without values has those that occur, a bounded number.
* Several instances of the buffer service show the same gauges: take `max`; their counters add up: take `sum`.
"""
TITLES = {
    Process.BUFFER_SERVICE: "Buffer service",
    Process.ROLLOUT_SERVER: "Rollout server",
    Process.LEARNER: "Learner (rank 0)",
    Process.SCHEDULER: "Scheduler",
    Process.EVALUATOR: "Evaluator",
    Process.DASHBOARD: "Dashboard",
}


def metrics_page() -> str:
    parts = [HEAD]
    everywhere = [metric for metric in METRICS if len(metric.processes) == len(Process)]
    parts.append("## Every process\n\n" + _table(everywhere))
    for process in Process:
        own = [metric for metric in metrics_of(process) if metric not in everywhere]
        parts.append(f"## {TITLES[process]}\n\n" + _table(own))
    return "\n".join(parts)


def _table(metrics: Sequence[Metric]) -> str:
    lines = ["| metric | type | unit | labels | meaning | panel |", "| --- | --- | --- | --- | --- | --- |"]
    for metric in metrics:
        cells = (f"`{metric.name}`", metric.kind, metric.unit, _labels(metric), metric.help, metric.panel)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _labels(metric: Metric) -> str:
    return "; ".join(
        f"{label.name} ({', '.join(label.values)})" if label.values else label.name for label in metric.labels
    )


def runbook() -> str:
    """The section of docs/monitoring.md between its two marks: one heading per alert, so that links reach it."""
    return "\n".join(_entry(alert) for alert in ALERTS)


def _entry(alert: Alert) -> str:
    return f"### {alert.full_name}\n\n*{alert.severity}.* {alert.summary}\n\n{alert.runbook}\n"
