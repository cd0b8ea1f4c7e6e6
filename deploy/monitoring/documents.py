"""The generated page of the docs: the table of metrics."""

from __future__ import annotations

from collections.abc import Sequence

from bapo.runtime.metrics.metric import Metric, Process
from bapo.runtime.metrics.registry import METRICS, metrics_of

HEAD = """\
# Metrics

Generated from `bapo/runtime/metrics` by `python -m deploy.monitoring`: do not edit. How to collect them:
[monitoring.md](monitoring.md).

* Every series has the label `run`; Prometheus adds `process` and `instance`, and every process has the standard
  `process_*` series. An unknown value is NaN or has no series.
* The unit is in the name: `_ratio` is a share. Names in `_total` are counters, rows marked (h) histograms, all others
  gauges.
* Values of labels are complete; a label without values has those that occur, a bounded number. `origin` is x1, x2 or
  x3, `purpose` fresh, reevaluate or evaluate, `table` fresh, reevaluated, bad or high.
* Instances of the buffer service show the same gauges: take `max`; their counters add up: take `sum`.
"""
COMMON = ("origin", "purpose", "table")
"""Labels whose values the head of the page has."""
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
    shared = [metric for metric in METRICS if len(metric.processes) > 1]
    parts.append("## Several processes\n\n" + _table(shared))
    for process in Process:
        own = [metric for metric in metrics_of(process) if metric not in shared]
        parts += [f"## {TITLES[process]}\n\n" + _table(own)] if own else []
    return "\n".join(parts)


def _table(metrics: Sequence[Metric]) -> str:
    lines = ["| metric | labels | meaning |", "|---|---|---|"]
    for metric in metrics:
        mark = " (h)" if metric.kind == "histogram" else ""
        lines.append(f"| `{metric.name}`{mark} | {_labels(metric)} | {metric.help} |")
    return "\n".join(lines) + "\n"


def _labels(metric: Metric) -> str:
    return "; ".join(
        f"{label.name} ({', '.join(label.values)})" if label.values and label.name not in COMMON else label.name
        for label in metric.labels
    )
