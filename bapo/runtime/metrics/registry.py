"""All metrics, by name and by process."""

from __future__ import annotations

from bapo.runtime.metrics import buffer_service, learner, rollout_server, services
from bapo.runtime.metrics.metric import Metric, Process

METRICS: tuple[Metric, ...] = (
    *buffer_service.METRICS,
    *rollout_server.METRICS,
    *learner.METRICS,
    *services.METRICS,
)
BY_NAME = {metric.name: metric for metric in METRICS}


def metrics_of(process: Process) -> tuple[Metric, ...]:
    """Metrics of a process, in registry order."""
    return tuple(metric for metric in METRICS if process in metric.processes)
