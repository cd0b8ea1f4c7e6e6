"""The theorem meter of a run: from the `divergences` and `bounds` of its steps to figures and tables. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bapo.report.data import Curve, Row

ORIGINS = ("x1", "x2", "x3")
MEANS = ("tv_tok", "tv_tok_p95", "tv_seq", "kl_fwd", "ess")
MOST = ("delta_max", "max_ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSummary:
    """One subset or one age of it, over all steps that had it."""

    origin: str
    age: int | None
    """None: all ages."""
    num_steps: int
    groups: float
    """Mean per step."""
    means: dict[str, float]
    """Mean over steps of each of MEANS."""
    most: dict[str, float]
    """Largest of all steps of each of MOST."""
    least_ess: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundSummary:
    """The estimated bound of one subset, over all steps that had one."""

    origin: str
    num_steps: int
    means: dict[str, float]
    """k, gain, penalty_theta, penalty_current, paper, tight: means over steps."""
    num_vacuous: dict[str, int]
    """Steps in which the form `paper` or `tight` was vacuous."""

    def words(self, form: str) -> str:
        """What this form of the bound says of the run."""
        if self.num_vacuous[form] == self.num_steps:
            return "vacuous in every step"
        return f"vacuous in {self.num_vacuous[form]} of {self.num_steps} steps"


def is_measured(metrics: Sequence[Row]) -> bool:
    """Whether any step was; runs of older versions have no such fields."""
    return any(row.get("divergences") for row in metrics)


def cells_of(metrics: Sequence[Row], *, policy: str = "theta_t") -> list[tuple[int, dict[str, Any]]]:
    """(step, cell) of every cell of this policy."""
    return [(row["step"], cell) for row in metrics for cell in row.get("divergences", ()) if cell["policy"] == policy]


def curves(metrics: Sequence[Row], name: str, *, spread: str | None = None) -> list[Curve]:
    """One number of each subset over the steps.

    Args:
        spread: another number of the same cell, that the curve reaches up to.
    """
    found = []
    for origin in ORIGINS:
        mine = [(step, cell) for step, cell in cells_of(metrics) if cell["origin"] == origin and cell["age"] is None]
        if mine:
            values = [cell[name] for _, cell in mine]
            high = [max(cell[spread], cell[name]) for _, cell in mine] if spread else []
            found.append(Curve(name=origin, steps=[step for step, _ in mine], values=values, high=high))
    return found


def cell_summaries(metrics: Sequence[Row], *, policy: str = "theta_t") -> list[CellSummary]:
    """Every subset, each with its ages behind it."""
    found: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    for _, cell in cells_of(metrics, policy=policy):
        found.setdefault((cell["origin"], cell["age"]), []).append(cell)
    keys = sorted(found, key=lambda key: (key[0], -1 if key[1] is None else key[1]))
    return [_summary(origin, age, found[origin, age]) for origin, age in keys]


def _summary(origin: str, age: int | None, cells: Sequence[Row]) -> CellSummary:
    return CellSummary(
        origin=origin,
        age=age,
        num_steps=len(cells),
        groups=sum(cell["num_groups"] for cell in cells) / len(cells),
        means={name: sum(cell[name] for cell in cells) / len(cells) for name in MEANS},
        most={name: max(cell[name] for cell in cells) for name in MOST},
        least_ess=min(cell["ess"] for cell in cells),
    )


def bound_summaries(metrics: Sequence[Row]) -> list[BoundSummary]:
    """Each subset that had a bound."""
    of = {origin: [b for row in metrics for b in row.get("bounds", ()) if b["origin"] == origin] for origin in ORIGINS}
    names = ("k", "gain", "penalty_theta", "penalty_current", "paper", "tight")
    return [
        BoundSummary(
            origin=origin,
            num_steps=len(bounds),
            means={name: sum(bound[name] for bound in bounds) / len(bounds) for name in names},
            num_vacuous={form: sum(bound[f"{form}_vacuous"] for bound in bounds) for form in ("paper", "tight")},
        )
        for origin, bounds in of.items()
        if bounds
    ]


def constants(metrics: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Least and largest of each K_i over the run; without those that no step had."""
    found = {}
    for name in ("k1", "k2", "k2_on_grid", "k3"):
        values = [row[name] for row in metrics if row.get(name) is not None]
        if values:
            found[name] = (min(values), max(values))
    return found


def warnings(metrics: Sequence[Row]) -> list[tuple[int, str]]:
    """(step, warning) of every step that had one."""
    return [(row["step"], row["warning"]) for row in metrics if row.get("warning")]
