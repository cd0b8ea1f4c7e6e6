"""The overview: curves, prompt visits and table ages, one value per learner step, sent incrementally."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bapo.algorithms.composer import Decision
from bapo.algorithms.composers.registry import load_composer
from bapo.config.tree import Config
from bapo.core.baselines import item_of, items_with_advantage
from bapo.core.correctness import measure_of
from bapo.core.statistics import change
from bapo.core.types import GroupResult, Origin, Purpose, num_correct, num_sampled, sampled_rewards
from bapo.runtime.run_directory.best import best_of
from bapo.runtime.run_directory.curves import BASE_VERSION, PHASES, held_out_curves, migrations, passed
from bapo.runtime.run_directory.recording import RecordedStep
from bapo.runtime.run_directory.shortfall import LATEST, NEARLY_EMPTY, shortfall
from services.dashboard.history import History
from services.dashboard.run_view import RunView, number

PLAIN = (
    "step", "time", "reward_mean", "r_tot", "c2", "c3", "x1", "x2", "x3", "batch_size", "num_bad", "num_high", "loss",
    "grad_norm", "entropy", "clip_ratio", "kl", "ratio_max", "k1", "k2", "k3", "lr", "num_tokens", "num_active_tokens",
    "num_updates", "step_s", "tokens_per_s", "warning", "episode_turns_mean", "episode_context_tokens_mean",
    "episode_forked_share", "episode_masked_share", "episode_calls_mean", "reward_parts", "reward_facts", "teacher_kl",
)  # fmt: skip
BY_ORIGIN = ("staleness_{}_mean", "staleness_{}_max", "tv_{}", "ess_{}", "delta_{}")
FIELDS = (*PLAIN, *(name.format(origin.value) for origin in Origin for name in BY_ORIGIN), *PHASES)
"""Fields of metrics.jsonl that are sent unchanged."""
CELL = ("origin", "age", "num_groups", "tv_tok", "ess", "delta_max")
"""Fields of each cell of the theorem meter under theta_t with an age."""
BOUND = ("origin", "num_groups", "gain", "penalty_theta", "penalty_current", "paper", "paper_vacuous", "tight",
         "tight_vacuous")  # fmt: skip


class StepRows:
    """A fold: the columns of metrics.jsonl that the page plots."""

    def __init__(self, config: Config) -> None:
        self._rows: list[list[Any]] = []
        self.latest = deque[Mapping[str, Any]](maxlen=LATEST)

    def advance(self, step: RecordedStep) -> None:
        row = step.metrics or {}
        self.latest.append(row)
        plain = [_second(row.get(name)) if name == "time" else number(row.get(name)) for name in FIELDS]
        self._rows.append([*plain, cells_of(row), bounds_of(row)])

    def columns(self, first: int) -> dict[str, list[Any]]:
        """Name -> values after the first `first` steps; `cells` and `bounds` have a list per step."""
        rows = self._rows[first:]
        return {name: [row[index] for row in rows] for index, name in enumerate((*FIELDS, "cells", "bounds"))}


def cells_of(row: Mapping[str, Any]) -> list[list[Any]]:
    cells = (cell for cell in row.get("divergences", ()) if cell["policy"] == "theta_t" and cell["age"] is not None)
    return [[number(cell.get(name)) for name in CELL] for cell in cells]


def bounds_of(row: Mapping[str, Any]) -> list[list[Any]]:
    return [[number(bound.get(name)) for name in BOUND] for bound in row.get("bounds", ())]


def _second(value: Any) -> Any:
    """Unix time, which needs more than six digits."""
    return None if value is None else round(value, 2)


COLUMNS = (
    "bins",
    "moved",
    "revisited",
    "unsolved",
    "rescued",
    "attribution",
    "reasons",
    "sample_s",
    "grade_s",
    "new_groups",
    "workers",
    "response_tokens",
)


@dataclass(slots=True)
class Seen:
    first: int
    """k at its first fresh visit."""
    last: int
    is_revisited: bool = False
    trained_by: set[Origin] = field(default_factory=set)
    """Origins of its groups with an advantage, or an expert's solution, that trained in earlier steps."""
    label: str = ""
    """Attribution under which it currently counts as newly solved; empty: none."""


class PromptVisits:
    """A fold: how prompts move between pass rate bins, and which were newly solved (figures 7 and 15).

    Counts like the comparison of runs, incrementally: per prompt it keeps the first and the last fresh
    visit, and the origins that trained it in between. Rows of an expert are no responses of the model.
    """

    def __init__(self, config: Config) -> None:
        self._size, self._pool = config.algorithm.sampled_size, config.loss.advantage_pool
        self._prompts: dict[str, Seen] = {}
        self._revisited = self._unsolved = 0
        self._rescued: Counter[str] = Counter()
        self._rows: list[list[Any]] = []

    def advance(self, step: RecordedStep) -> None:
        """Add one step: its visits first, then the trained groups."""
        new = list({result.group_id: result for result in step.results if result.birth == step.step}.values())
        visits = [result for result in new if result.purpose is Purpose.FRESH and num_sampled(result) == self._size]
        bins = Counter(num_correct(sampled_rewards(result)) for result in visits)
        moved: Counter[int] = Counter()
        for result in visits:
            self._visit(result, moved)
        useful = items_with_advantage(step.results, step.step, self._pool)
        for result in step.results:
            trains = result.kind == "sft" or item_of(result) in useful
            if result.origin is not None and trains and result.prompt_id in self._prompts:
                self._prompts[result.prompt_id].trained_by.add(result.origin)
        self._rows.append([
            [bins[k] for k in range(self._size + 1)] if step.results else None,
            [number for cell, change in sorted(moved.items()) if change for number in (cell, change)],
            self._revisited,
            self._unsolved,
            self._rescued.total(),
            {label: count for label, count in sorted(self._rescued.items()) if count},
            dict(Counter(result.reason for result in step.results).most_common()),
            number(sum(result.sample_s for result in new)),
            number(sum(result.grade_s for result in new)),
            len(new),
            len({result.worker_id for result in new if result.worker_id}),
            number(sum(result.num_tokens for result in visits) / (len(visits) * self._size)) if visits else None,
        ])  # fmt: skip

    def columns(self, first: int) -> dict[str, list[Any]]:
        """
        bins         [G + 1] fresh groups of the step with k of G sampled responses correct (Fig. 7); null if unknown
        moved        changes of the migration matrix: cell, change, cell, change ...; a cell is first * (G + 1) + last
        revisited    prompts seen at least twice so far: the sum of the matrix
        unsolved     of these, prompts without a correct response at first
        rescued      of these, newly solved ones; `attribution`: by the origins that trained them in between
        reasons      outcome of every group that the assembly read
        response_tokens   mean length of the fresh responses
        sample_s, grade_s   seconds taken by the `new_groups` groups new in this step, on `workers` workers
        """
        rows = self._rows[first:]
        return {name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)}

    def _visit(self, result: GroupResult, moved: Counter[int]) -> None:
        now = num_correct(sampled_rewards(result))
        seen = self._prompts.get(result.prompt_id)
        if seen is None:
            self._prompts[result.prompt_id] = Seen(first=now, last=now)
            return
        if seen.is_revisited:
            moved[self._cell(seen)] -= 1
        else:
            seen.is_revisited = True
            self._revisited += 1
            self._unsolved += seen.first == 0
        seen.last = now
        moved[self._cell(seen)] += 1
        self._count_rescue(seen)

    def _count_rescue(self, seen: Seen) -> None:
        """Update the count; a newly solved prompt that is all-incorrect again no longer counts."""
        if seen.label:
            self._rescued[seen.label] -= 1
        trained = "+".join(sorted(origin.value for origin in seen.trained_by)) or "none of them"
        seen.label = trained if seen.first == 0 and seen.last > 0 else ""
        if seen.label:
            self._rescued[seen.label] += 1

    def _cell(self, seen: Seen) -> int:
        return seen.first * (self._size + 1) + seen.last


LAST_AGES = (0, 1, 2, 3, 5, 10, 20, 50)
"""Upper ends of the age ranges, in steps; older entries are in a last range."""


def table_ages(history: History, first: int) -> dict[str, list[Any]]:
    """Ages of the entries of B_bad and B_high after each step except the first `first` ones, from replayed tables.

    Tables are not recorded: they follow from the groups, the settings and the seed. If the replay differs from the
    run, or the groups of a step are unknown, ages are unknown from there on.

    bad_ages, high_ages       [ranges] entries after the step, by `LAST_AGES`; null if unknown
    bad_oldest, high_oldest   age of the oldest entry; null if there is none
    """
    rows = [_row(step, decision) for step, decision in history.decisions(first)]
    names = ("bad_ages", "high_ages", "bad_oldest", "high_oldest")
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


def _row(step: int, decision: Decision | None) -> tuple[Any, ...]:
    """(bad_ages, high_ages, bad_oldest, high_oldest) after a step."""
    if decision is None:
        return None, None, None, None
    bad = [step - entry.birth for entry in decision.bad]
    high = [step - stat.birth for stat in decision.high]
    return by_range(bad), by_range(high), max(bad, default=None), max(high, default=None)


def by_range(ages: Iterable[int], ends: Sequence[int] = LAST_AGES) -> list[int]:
    """[len(ends) + 1] number of ages in each range."""
    counts = [0] * (len(ends) + 1)
    for age in ages:
        counts[bisect_left(ends, age)] += 1
    return counts


Row = Mapping[str, Any]


def overview(view: RunView, *, since: int = 0, measured: int = 0, generation: int = 0) -> dict[str, Any]:
    """Data after the first `since` steps and the first `measured` evaluations of this generation.

    Returns: `first` (number of skipped steps), `steps` (column name -> values), `held_out` (complete, or null without
    a new evaluation), `measured`, `run` (settings and status), `meanings` (reason -> explanation; only in the
    first response).
    """
    first, known = view.first_new(since, generation), view.first_new(measured, generation)
    steps = view.fold(StepRows).columns(first) | view.fold(PromptVisits).columns(first)
    steps |= table_ages(view.fold(History), first)
    rows = view.evaluations
    return {
        "first": first,
        "steps": steps,
        "measured": len(rows),
        "held_out": held_out(rows) if len(rows) != known else None,
        "run": about(view),
        "meanings": view.fold(History).meanings if first == 0 else None,
    }


def about(view: RunView) -> dict[str, Any]:
    """Constant properties and the status of the run."""
    fields, config = view.run.read_run(), view.config
    composer = load_composer(config.algorithm)
    thresholds = composer.decides_by
    best = best_of(view.evaluations, config.evaluation.best_measure)
    return {
        "name": config.run.name,
        "status": fields.get("status"),
        "message": fields.get("message"),
        "started_at": fields.get("started_at"),
        "ended_at": fields.get("ended_at"),
        "num_steps": config.run.num_steps,
        "ended": view.ended,
        "best": None if best is None else asdict(best),
        "method": config.method if config.sft is None else "supervised fine-tuning",
        "model": config.model.path,
        "task": config.task.name if config.sft is None else config.sft.data,
        "batch_size": config.algorithm.batch_size,
        "group_size": config.algorithm.sampled_size,
        "c1": config.algorithm.c1 if "c1" in thresholds else None,
        "has_window": "c2" in thresholds,
        "has_buffers": composer.high_window is not None,
        "nearly_empty": NEARLY_EMPTY,
        "shortfall": shortfall(tuple(view.fold(StepRows).latest)),
        "v": config.cadence.weight_sync_interval,
        "m": config.cadence.reevaluation_interval,
        "max_staleness": config.cadence.max_staleness,
        "tv_warn": config.diagnostics.tv_warn,
        "ess_warn": config.diagnostics.ess_warn,
        "age_ends": LAST_AGES,
    }


def held_out(evaluations: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry per split, with points in step order.

    `measure`: what `accuracy` is called, see `measure_of`; `accuracy`, `low` and `high`: see `held_out_curves`;
    `num_prompts`: of each point; `change`: [mean, low, high] of the paired change from the first measurement to each
    point, null where they share fewer than two prompts.
    `matrices`: per measurement [n + 1][n + 1] prompts by right responses before training (row) and now; null where the
    base model was not measured. `num_samples`: n of the first one. `passed`: pass@k of each point, as the base model's
    plus the change on shared prompts, like `accuracy`; `k`: the fewest samples of a measurement.
    """
    found = []
    for curve in held_out_curves(evaluations):
        rows = sorted((row for row in evaluations if row["split"] == curve.name), key=lambda row: row["step"])
        base = next((row for row in rows if row["version"] == BASE_VERSION), None)
        k = min(row["num_samples"] for row in rows)
        (solved,) = held_out_curves([passed(row, k) for row in rows])
        found.append({
            "split": curve.name,
            "measure": measure_of(rows),
            "num_prompts": list(curve.num_prompts),
            "num_samples": rows[0]["num_samples"],
            "interval": rows[0]["interval"],
            "step": list(curve.steps),
            "accuracy": [number(value) for value in curve.values],
            "low": [number(value) for value in curve.low],
            "high": [number(value) for value in curve.high],
            "change": [_change(rows[0], row) for row in rows],
            "k": k,
            "passed": [number(value) for value in solved.values],
            "matrices": [_moved(base, row) for row in rows],
            **{name: [row.get(name) for row in rows] for name in ("reward_parts", "reward_facts")},
        })  # fmt: skip
    return found


def _change(first: Row, row: Row) -> list[float | None] | None:
    found = None if row is first else change(first, row)
    return None if found is None else [number(value) for value in (found.mean, found.low, found.high)]


def _moved(base: Row | None, row: Row) -> list[list[int]] | None:
    """Matrix over the prompts that both evaluations have; None if there is nothing to compare with."""
    if base is None or base["num_samples"] != row["num_samples"]:
        return None
    before, after = base["rewards"], row["rewards"]
    pairs = [(num_correct(before[name]), num_correct(after[name])) for name in before if name in after]
    return [list(line) for line in migrations(pairs, int(row["num_samples"]))]
