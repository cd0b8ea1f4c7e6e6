"""Off-policy alarm: a warning when the policy has drifted too far from the behavior policies of its batch.

The total variation per token measures the drift from alpha independent of length; the effective sample size measures
how many responses still count after reweighting. Bounds over whole sequences are not used: long responses make them
vacuous in healthy runs, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bapo.algorithms.composers.registry import load_composer
from bapo.config.advice import lower
from bapo.config.learner import DiagnosticsConfig
from bapo.config.tree import Config
from bapo.core.types import Origin
from learner.diagnostics.theorem_meter import Cell

log = logging.getLogger(__name__)

COOLDOWN_STEPS = 20
"""Minimum number of steps between two warnings about the same subset."""

MIN_RESPONSES = 16
"""Minimum size of a cell: in a group of 8, a single outlier halves the effective sample size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """The worst cell of a step."""

    step: int
    origin: Origin
    text: str
    """Subset, age, value and remedy."""


def alarm_of(step: int, cells: Sequence[Cell], config: Config) -> Alarm | None:
    """The cell furthest beyond its limit; None if all are within limits."""
    found = [excess for cell in cells if _counts(cell) for excess in _excesses(cell, config.diagnostics)]
    if not found:
        return None
    # A single age is more specific than its subset, which is reported if no single age is large enough.
    _, _, cell, measure = max(found, key=lambda excess: excess[:2])
    return Alarm(step=step, origin=cell.origin, text=f"{_name(cell)}: {measure}; {_remedy(cell, config)}")


def _counts(cell: Cell) -> bool:
    return cell.policy == "theta_t" and cell.num_responses >= MIN_RESPONSES


def _excesses(cell: Cell, settings: DiagnosticsConfig) -> Iterator[tuple[bool, float, Cell, str]]:
    """(whether it is a single age, ratio to the limit, cell, measurement)."""
    tv, ess = cell.means.tv_tok, cell.means.ess
    is_one_age = cell.age is not None
    if tv > settings.tv_warn:
        yield is_one_age, tv / settings.tv_warn, cell, f"tv_tok={tv:.3f} is more than {settings.tv_warn:g}"
    if ess < settings.ess_warn:
        yield is_one_age, settings.ess_warn / ess, cell, f"ess={ess:.2f} is less than {settings.ess_warn:g}"


def _name(cell: Cell) -> str:
    age = "" if cell.age is None else f" of age {cell.age}"
    return f"{cell.origin.value}{age} ({cell.num_groups} groups)"


def _remedy(cell: Cell, config: Config) -> str:
    if cell.origin is Origin.X3:
        return lower(config, *load_composer(config.algorithm).ages_by, "learner.lr")
    if cell.age == 0:
        return (
            "the weights are the same, so engine and learner disagree: compare model.dtype and rollout.engine_options"
        )
    return lower(config, "cadence.weight_sync_interval", "cadence.max_steps_ahead", "learner.lr")


class AlarmLog:
    """Logs alarms, at most one per subset within `COOLDOWN_STEPS`."""

    def __init__(self) -> None:
        self._last: dict[Origin, int] = {}

    def warn(self, alarm: Alarm) -> None:
        """Log the alarm unless its subset is in cooldown."""
        last = self._last.get(alarm.origin)
        if last is None or alarm.step - last >= COOLDOWN_STEPS:
            self._last[alarm.origin] = alarm.step
            log.warning("step %d off-policy drift: %s", alarm.step, alarm.text)
