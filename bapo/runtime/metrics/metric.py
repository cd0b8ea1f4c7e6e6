"""The definition of a metric.

Rules: `bapo_<component>_<thing>_<unit>`, base units, bounded labels; never a prompt id, step or version as a label.
Unknown values are NaN or have no series: 0 always means zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 600.0)
STEPS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0)
RATIOS = (0.5, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 2.0, 5.0, 10.0)
CALL_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0, 10.0, 60.0, 600.0)
"""Of what takes milliseconds, and is waited for."""
TOKENS = tuple(float(1 << power) for power in range(3, 16))
"""8 to 32768."""


class Process(StrEnum):
    """The process of a metric, as named in RUN/ports and RUN/logs."""

    BUFFER_SERVICE = "buffer_service"
    ROLLOUT_SERVER = "rollout_server"
    LEARNER = "learner"
    SCHEDULER = "scheduler"
    EVALUATOR = "evaluator"
    DASHBOARD = "dashboard"


ALL = tuple(Process)

UNITS: Mapping[str, str] = {
    "seconds": "s",
    "bytes": "bytes",
    "tokens": "tokens",
    "groups": "groups",
    "steps": "steps",
    "nats": "nats",
    "ratio": "share",
    "info": "1",
}
"""Suffix of a name, without `_total` -> unit. Other metrics are counts, or have no unit."""


@dataclass(frozen=True, slots=True)
class Label:
    """A label of a metric."""

    name: str
    values: tuple[str, ...] = ()
    """All possible values, if known in advance: such counters are initialized to 0."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of the registry."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    panel: str
    """Dashboard and row that display it, such as `run/Buffers`."""
    processes: tuple[Process, ...]
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = SECONDS
    added_up: bool = False
    """Whether the histogram receives counts per bucket from other processes."""

    @property
    def unit(self) -> str:
        """Unit from the suffix of the name; "" for counts and dimensionless values."""
        return UNITS.get(self.name.removesuffix("_total").rsplit("_", 1)[-1], "")

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)


ORIGIN = Label("origin", ("x1", "x2", "x3"))
PURPOSE = Label("purpose", ("fresh", "reevaluate", "evaluate"))
TRAINING = Label("purpose", ("fresh", "reevaluate"))
WORKER = Label("worker")
"""Worker slot; bounded by rollout.max_workers."""
SPLIT = Label("split")
TASK = Label("task")
