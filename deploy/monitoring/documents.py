"""The generated page of the docs: the table of metrics."""

from __future__ import annotations

from collections.abc import Sequence

from bapo.runtime.metrics.metric import Metric, Process
from bapo.runtime.metrics.registry import METRICS, metrics_of

HEAD = """\
# Metrics

Generated from `bapo/runtime/metrics` by `python -m deploy.monitoring`: do not edit. How to collect them:
[monitoring.md](monitoring.md).

* Labels are in braces. Every series has also `run`, and from Prometheus `process` and `instance`; every process has the
  standard `process_*` series. An unknown value is NaN or has no series.
* The unit is in the name: `_ratio` is a share. Names in `_total` are counters, rows with (h) histograms, others gauges.
* Values that are listed are complete; other labels have those that occur, a bounded number. `origin` is x1, x2 or x3,
  `purpose` fresh, reevaluate or evaluate, `table` fresh, reevaluated, bad or high.
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
    lines = ["| metric | meaning |", "|---|---|"]
    for metric in metrics:
        mark = " (h)" if metric.kind == "histogram" else ""
        labels = f"{{{', '.join(label.name for label in metric.labels)}}}" if metric.labels else ""
        lines.append(f"| `{metric.name}{labels}`{mark} | {_meaning(metric)} |")
    return "\n".join(lines) + "\n"


def _meaning(metric: Metric) -> str:
    """With the values of labels that it does not name."""
    text = metric.help
    for label in metric.labels:
        if label.name not in COMMON and not all(value in metric.help for value in label.values):
            start = text.removesuffix(".") if text.endswith(f" {label.name}.") else f"{text} {label.name}"
            text = f"{start}: {', '.join(label.values)}."
    return text
