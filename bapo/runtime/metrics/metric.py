"""One line of the registry of metrics.

Rules: `bapo_<component>_<thing>_<unit>`, base units, bounded labels; never a prompt id, step or version as a label.
A number that a process does not know is NaN or has no series: 0 always means that there were none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 600.0)
STEPS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0)
RATIOS = (0.5, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 2.0, 5.0, 10.0)
TOKENS = tuple(float(1 << power) for power in range(3, 16))
"""8 to 32768."""


class Process(StrEnum):
    """Who exposes a metric: the names of RUN/ports and RUN/logs."""

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
"""Last word of a name, without `_total` -> unit. Other names count what they name, or have no unit."""


@dataclass(frozen=True, slots=True)
class Label:
    """One label of a metric."""

    name: str
    values: tuple[str, ...] = ()
    """All that it can be, where they are known beforehand: such counters exist, and are 0, from the start."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the registry."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    panel: str
    """Dashboard and row that show it, such as `run/Buffers`."""
    processes: tuple[Process, ...]
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = SECONDS
    added_up: bool = False
    """A histogram whose observations are made elsewhere and arrive as counts per bucket."""

    @property
    def unit(self) -> str:
        """From the last word of the name; "" for a count or a number without unit."""
        return UNITS.get(self.name.removesuffix("_total").rsplit("_", 1)[-1], "")

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)


ORIGIN = Label("origin", ("x1", "x2", "x3"))
PURPOSE = Label("purpose", ("fresh", "reevaluate", "evaluate"))
TRAINING = Label("purpose", ("fresh", "reevaluate"))
WORKER = Label("worker")
"""Bounded by rollout.max_workers: a place of the fleet, whichever worker has it."""
SPLIT = Label("split")
TASK = Label("task")
