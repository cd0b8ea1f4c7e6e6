"""The theorem meter: the terms of theorem 3.2 for one step, from log-probs that the update computes anyway.

    pi_theta_t / alpha   all responses with log-probs at theta_t             delta_1 on X1, delta_3 on X3
    pi_theta   / alpha   responses of the last mini-batch, from its forward pass: theta after all optimizer steps
                         except one

By subset and age: steps since the policy version for X1 and X2, steps since insertion for X3.
Suffixes: M response tokens of the batch, R responses, P groups.
Excluded: responses that the loss does not need (advantage 0 without KL and entropy), and expert responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bapo.algorithms.settings import AlgorithmConfig
from bapo.core.types import Batch, Origin
from learner.batch.columns import Columns
from learner.diagnostics.divergences import (
    MAX_LOG_RATIO,
    Divergences,
    GroupGaps,
    ResponseGaps,
    group_gaps,
    pooled,
    response_gaps,
)
from learner.diagnostics.theory import Bound, k1, k2, k2_on_grid, k3, reweighted_rewards, subset_bound

Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Int64s = NDArray[np.int64]

NUM_RATIOS = 512
SPREADS = {"p50": 50, "p95": 95, "max": 100}
"""Percentiles over the groups of a cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Off-policy drift on one subset, or one age of it."""

    policy: Literal["theta_t", "theta"]
    origin: Origin
    age: int | None
    """None: all ages of the subset."""
    num_groups: int
    num_responses: int
    num_tokens: int
    means: Divergences
    delta: float
    """Mean over groups of the upper bound of TV(pi(.|x), alpha(.|x))."""
    spreads: dict[str, float]
    """tv_tok_p50 ...: over groups, for each field of GroupGaps."""

    def row(self) -> dict[str, Any]:
        """The cell as a JSON object for the run's records, with six significant digits."""
        head = {"policy": self.policy, "origin": self.origin.value, "age": self.age}
        counts = {name: getattr(self, name) for name in ("num_groups", "num_responses", "num_tokens")}
        return head | counts | rounded({**asdict(self.means), "delta": self.delta, **self.spreads})


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Measurements of one step."""

    cells: tuple[Cell, ...] = ()
    bounds: tuple[tuple[Origin, Bound], ...] = ()
    ratios: Mapping[Origin, tuple[float, ...]] = field(default_factory=dict)
    """pi_theta_t / alpha of at most NUM_RATIOS evenly spaced tokens of each subset."""

    def subset(self, origin: Origin) -> Cell | None:
        """pi_theta_t against alpha on one subset; None if nothing of it was evaluated."""
        found = (cell for cell in self.cells if cell.policy == "theta_t" and cell.origin is origin and cell.age is None)
        return next(found, None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gaps:
    """One policy against the behavior policies, on the evaluated responses."""

    responses: ResponseGaps
    index_R: Int64s
    """Indices of the responses in the batch."""
    group_R: Int64s
    """Group of each response; not all groups are necessarily present."""

    @property
    def groups(self) -> Int64s:
        """Present groups, in order."""
        return np.unique(self.group_R)

    def of(self, chosen_P: NDArray[np.bool_]) -> Gaps:
        """The gaps of these groups."""
        chosen_R = chosen_P[self.group_R]
        return Gaps(
            responses=self.responses.of(chosen_R), index_R=self.index_R[chosen_R], group_R=self.group_R[chosen_R]
        )

    def deltas(self, size_P: Int64s) -> Float64s:
        """[P] delta of each group with all responses present; NaN for the others.

        Args:
            size_P: responses of each group of the batch.
        """
        delta_P = np.full(len(size_P), np.nan)
        delta_P[self.groups] = group_gaps(self.responses, self.group_R).delta
        return np.where(np.bincount(self.group_R, minlength=len(size_P)) == size_P, delta_P, np.nan)


def diagnose(batch: Batch, columns: Columns, theta_t_M: Float32s, newest_M: Float32s, *, eps: float) -> Diagnosis:
    """Measure one step.

    Args:
        theta_t_M: log pi_theta_t; newest_M: log pi_theta of the last mini-batch. NaN where missing.
        eps: smoothing of sigma.
    """
    ages_P = np.array(ages_of(batch), dtype=np.int64)
    now, newest = gaps_of(columns, theta_t_M), gaps_of(columns, newest_M)
    cells = [*cells_of(batch, "theta_t", now, ages_P), *cells_of(batch, "theta", newest, None)]
    bounds = tuple(bounds_of(batch, columns, now, newest, eps))
    return Diagnosis(cells=tuple(cells), bounds=bounds, ratios=ratios_of(batch, columns, theta_t_M))


def ratios_of(batch: Batch, columns: Columns, theta_t_M: Float32s) -> dict[Origin, tuple[float, ...]]:
    """Token ratios of each nonempty subset: at most NUM_RATIOS, evenly spaced, to keep histograms cheap."""
    origins_P = np.array([entry.origin.value for entry in batch.entries])
    known_R = ~(np.isnan(theta_t_M[columns.starts_R[:-1]]) | columns.expert_R)
    found = {}
    for origin in Origin:
        chosen_M = np.repeat(known_R & (origins_P[columns.group_R] == origin.value), columns.lengths_R)
        tokens = np.flatnonzero(chosen_M)
        if len(tokens):
            spread = tokens[np.linspace(0, len(tokens) - 1, min(NUM_RATIOS, len(tokens))).astype(np.int64)]
            log_ratios = np.clip(theta_t_M[spread] - columns.rollout_logprobs_M[spread], -MAX_LOG_RATIO, MAX_LOG_RATIO)
            found[origin] = tuple(np.exp(log_ratios.astype(np.float64)).tolist())
    return found


def ages_of(batch: Batch) -> list[int]:
    """[P] steps since insertion for X3, since the policy version for X1, X2 and rows joined from several groups."""
    births = {result.group_id: result.birth for result in batch.results if result.origin is Origin.X3}
    return [batch.step - births.get(e.group.group_id, e.group.policy_version) for e in batch.entries]


def gaps_of(columns: Columns, logprobs_M: Float32s) -> Gaps | None:
    """Gaps of the sampled responses with log-probs; None if there are none."""
    known_R = ~(np.isnan(logprobs_M[columns.starts_R[:-1]]) | columns.expert_R)
    if not known_R.any():
        return None
    rollout_M, lengths_R = columns.rollout_logprobs_M, columns.lengths_R
    if not known_R.all():
        known_M = np.repeat(known_R, lengths_R)
        logprobs_M, rollout_M, lengths_R = logprobs_M[known_M], rollout_M[known_M], lengths_R[known_R]
    return Gaps(
        responses=response_gaps(logprobs_M, rollout_M, lengths_R),
        index_R=np.flatnonzero(known_R),
        group_R=columns.group_R[known_R],
    )


def cells_of(
    batch: Batch, policy: Literal["theta_t", "theta"], gaps: Gaps | None, ages_P: Int64s | None
) -> Iterator[Cell]:
    """Each nonempty subset, followed by its ages if given."""
    if gaps is None:
        return
    for origin in Origin:
        chosen_P = _are(batch, origin)
        whole = gaps.of(chosen_P)
        if not len(whole.responses):
            continue
        yield _cell(policy, origin, None, whole)
        for age in () if ages_P is None else np.unique(ages_P[whole.groups]):
            yield _cell(policy, origin, int(age), gaps.of(chosen_P & (ages_P == age)))


def _cell(policy: Literal["theta_t", "theta"], origin: Origin, age: int | None, gaps: Gaps) -> Cell:
    groups = group_gaps(gaps.responses, gaps.group_R)
    spreads: dict[str, float] = {}
    for column in fields(GroupGaps):
        values = np.percentile(getattr(groups, column.name), list(SPREADS.values()))
        spreads |= {f"{column.name}_{name}": float(value) for name, value in zip(SPREADS, values, strict=True)}
    return Cell(
        policy=policy,
        origin=origin,
        age=age,
        num_groups=len(groups.delta),
        num_responses=len(gaps.responses),
        num_tokens=int(gaps.responses.num_tokens.sum()),
        means=pooled(gaps.responses),
        delta=float(groups.delta.mean()),
        spreads=spreads,
    )


def bounds_of(
    batch: Batch, columns: Columns, now: Gaps | None, newest: Gaps | None, eps: float
) -> Iterator[tuple[Origin, Bound]]:
    """The bound of each subset, on the groups of the last mini-batch with all responses known.

    Zero-variance groups are outside the theorem: they are in no subset, and their sigma is only eps.
    """
    if newest is None:
        return
    size_P = np.bincount(columns.group_R)
    rewards_R = np.concatenate([entry.group.rewards for entry in batch.entries]).astype(np.float64)
    mu_P = np.bincount(columns.group_R, rewards_R) / size_P
    variance_P = np.bincount(columns.group_R, (rewards_R - mu_P[columns.group_R]) ** 2) / size_P
    j_P = reweighted_rewards(newest.responses.log_weight, rewards_R[newest.index_R], newest.group_R, len(size_P))
    theta_P, current_P = newest.deltas(size_P), _current_deltas(batch, now, size_P)
    usable_P = ~np.isnan(theta_P) & ~np.isnan(current_P) & (variance_P > 0)
    for origin in Origin:
        mine = usable_P & _are(batch, origin)
        if mine.any():
            bound = subset_bound(
                j_theta=j_P[mine],
                mu=mu_P[mine],
                sigma=np.sqrt(variance_P[mine] + eps),
                tv_theta=theta_P[mine],
                tv_current=current_P[mine],
            )
            yield origin, bound


def _current_deltas(batch: Batch, now: Gaps | None, size_P: Int64s) -> Float64s:
    """[P] TV(pi_theta_t, alpha); 0 where alpha is pi_theta_t, as in eq. 6 for X2; sampled ahead, X2 may be older."""
    found_P = np.full(len(size_P), np.nan) if now is None else now.deltas(size_P)
    is_current = [e.origin is Origin.X2 and e.group.policy_version == batch.step for e in batch.entries]
    return np.where(is_current, 0.0, found_P)


def _are(batch: Batch, origin: Origin) -> NDArray[np.bool_]:
    """[P] whether each group is of this subset."""
    return np.array([entry.origin is origin for entry in batch.entries])


def rounded(numbers: dict[str, float]) -> dict[str, float]:
    """Round to six significant digits, which halves the file size."""
    return {name: float(f"{value:.6g}") for name, value in numbers.items()}


def theorem_fields(batch: Batch, diagnosis: Diagnosis, algorithm: AlgorithmConfig, eps: float) -> dict[str, Any]:
    """Theorem fields of a row of metrics.jsonl: constants, one number per subset, then all cells and bounds."""
    subsets = {origin.value: diagnosis.subset(origin) for origin in Origin}
    return {
        **constants_of(batch, algorithm, eps),
        **{f"tv_{name}": cell and cell.means.tv_tok for name, cell in subsets.items()},
        **{f"ess_{name}": cell and cell.means.ess for name, cell in subsets.items()},
        **{f"delta_{name}": cell and cell.spreads["delta_max"] for name, cell in subsets.items()},
        "divergences": [cell.row() for cell in diagnosis.cells],
        "bounds": [_bound_row(origin, bound) for origin, bound in diagnosis.bounds],
    }


def constants_of(batch: Batch, algorithm: AlgorithmConfig, eps: float) -> dict[str, float | None]:
    """K_1, K_2 (as printed and on the grid of k/G) and K_3 of this step; None where sigma is 0 or no level fits."""
    formulas: dict[str, Callable[[], float]] = {
        "k1": lambda: k1(algorithm.group_size, eps),
        "k2": lambda: k2(algorithm.c1, eps),
        "k2_on_grid": lambda: k2_on_grid(algorithm.c1, algorithm.group_size, eps),
        "k3": lambda: k3(batch.facts["c2"], batch.facts["c3"], eps),
    }
    return {name: _or_none(formula) for name, formula in formulas.items()}


def _or_none(formula: Callable[[], float]) -> float | None:
    try:
        return formula()
    except (ZeroDivisionError, ValueError, KeyError):  # no level fits, or the composer has no window
        return None


def _bound_row(origin: Origin, bound: Bound) -> dict[str, Any]:
    head: dict[str, Any] = {"origin": origin.value, "num_groups": bound.num_groups}
    parts = {name: getattr(bound, name) for name in ("k", "gain", "penalty_theta", "penalty_current")}
    row = head | rounded(parts)
    for name in ("paper", "tight"):
        estimate = getattr(bound, name)
        row |= rounded({name: estimate.mean})
        row[f"{name}_stderr"] = None if estimate.stderr is None else rounded({"": estimate.stderr})[""]
        row[f"{name}_vacuous"] = estimate.is_vacuous
    return row
