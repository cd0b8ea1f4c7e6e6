"""What an alert is: a rule of Prometheus, what to do about it, and the series with which its unit test fires it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

DOCS = "docs/monitoring.md#when-an-alert-fires"
PREFIX = "Bapo"


@dataclass(frozen=True, slots=True)
class Clock:
    """Durations of rules. `speed`: that many times shorter, for tests that provoke a real fault."""

    speed: float = 1.0

    def span(self, seconds: float) -> str:
        """As PromQL writes a duration; at least a second."""
        return f"{max(1, round(seconds / self.speed))}s"

    def seconds(self, seconds: float) -> str:
        return f"{seconds / self.speed:g}"


@dataclass(frozen=True, slots=True)
class Case:
    """Made-up series, one value per minute, as promtool writes them."""

    series: dict[str, str]
    at_minute: int
    labels: dict[str, str] = field(default_factory=lambda: {"run": "r"})
    """Of the alert that fires then, besides its severity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    name: str
    severity: Literal["critical", "warning", "info"]
    summary: str
    runbook: str
    """What to do: one line, in the alert itself and in the dashboard Runbook."""
    expr: Callable[[Clock], str]
    for_s: float = 0.0
    """How long it must be the case."""
    fires: Case
    quiet: Case

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def annotations(self) -> dict[str, str]:
        return {"summary": self.summary, "runbook": self.runbook, "runbook_url": DOCS}

    def rule(self, clock: Clock) -> dict[str, Any]:
        found: dict[str, Any] = {"alert": self.full_name, "expr": self.expr(clock)}
        if self.for_s:
            found["for"] = clock.span(self.for_s)
        return found | {"labels": {"severity": self.severity}, "annotations": self.annotations}

    def test(self, case: Case, *, fires: bool) -> dict[str, Any]:
        expected = {"exp_labels": {"severity": self.severity, **case.labels}, "exp_annotations": self.annotations}
        return {
            "name": f"{self.full_name} {'fires' if fires else 'stays quiet'}",
            "interval": "1m",
            "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
            "alert_rule_test": [
                {
                    "eval_time": f"{case.at_minute}m",
                    "alertname": self.full_name,
                    "exp_alerts": [expected] if fires else [],
                }
            ],
        }
