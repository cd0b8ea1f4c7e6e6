"""The paper's figures from the records of runs: lines over steps, bars of accuracy bins, migration matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bapo.core.types import Origin, Purpose, num_sampled
from studies.compare.accuracy import average_curve, curve, measure
from studies.compare.gather import Compared, Measured, Method, Row, changed_keys, contrasts
from studies.compare.prompts import (
    Matrix,
    bins_by_epoch,
    bins_of,
    floor_matrix,
    held_out_matrix,
    looks,
    named_bases,
    training_matrix,
)
from studies.drawing import COLORS, INK, LINE_COLORS, RED, Axes, Figure, grid, label, line_style

WINDOW_SHARE = 12
"""A line over steps is the mean of one in this many: single steps are noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    label: str
    steps: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    """The least over seeds; equal to the mean with one seed."""
    high: Sequence[float]

    @property
    def best(self) -> tuple[float, float]:
        """(step, value) of its highest point."""
        place = max(range(len(self.mean)), key=lambda i: self.mean[i])
        return self.steps[place], self.mean[place]


Points = Sequence[tuple[float, float]]
"""(step, value) of one run."""


def over_seeds(label: str, runs: Sequence[Points]) -> Series | None:
    """One line from the points of several runs, at the steps that all of them have; None when there are none."""
    tables = [dict(points) for points in runs if points]
    steps = sorted(set(tables[0]).intersection(*tables[1:])) if tables else []
    if not steps:
        return None
    columns = [[table[step] for table in tables] for step in steps]
    return Series(
        label=label,
        steps=steps,
        mean=[sum(column) / len(column) for column in columns],
        low=[min(column) for column in columns],
        high=[max(column) for column in columns],
    )


def of_metric(method: Method, value: Callable[[Row], float | None]) -> Series | None:
    return over_seeds(method.label, [_smooth([(r["step"], value(r)) for r in run.metrics]) for run in method.runs])


def reward(method: Method) -> Series | None:
    return of_metric(method, lambda row: row["reward_mean"])


def response_length(method: Method) -> Series | None:
    return over_seeds(method.label, [_smooth(response_lengths(run)) for run in method.runs])


def cumulative_rollouts(method: Method) -> Series | None:
    return over_seeds(method.label, [list(run.ledger.rollouts_by_step.items()) for run in method.runs])


def accuracy(method: Method, split: str) -> Series | None:
    return over_seeds(method.label, [curve(run, split) for run in method.runs])


def average_accuracy(method: Method, splits: Sequence[str]) -> Series | None:
    return over_seeds(method.label, [average_curve(run, splits) for run in method.runs]) if splits else None


def parts(method: Method) -> dict[Origin, Series]:
    """X1, X2 and X3 of each step, smoothed (figures 8 and 14)."""
    found = {origin: of_metric(method, partial(_size, origin.value)) for origin in Origin}
    return {origin: series for origin, series in found.items() if series is not None}


def response_lengths(run: Measured) -> list[tuple[float, float | None]]:
    """(step, mean tokens of its fresh responses); None for a step that has none."""
    points: list[tuple[float, float | None]] = []
    for step, results in run.sampled:
        fresh = [result for result in results if result.purpose is Purpose.FRESH]
        responses = sum(map(num_sampled, fresh))
        points.append((step, sum(result.num_tokens for result in fresh) / responses if responses else None))
    return points


def _size(key: str, row: Row) -> float:
    return float(row[key])


def _smooth(points: Sequence[tuple[float, float | None]]) -> Points:
    known = [(step, value) for step, value in points if value is not None]
    window = max(1, len(known) // WINDOW_SHARE)
    means = smoothed([value for _, value in known], window)
    return [(step, mean) for (step, _), mean in zip(known, means, strict=True)]


Drawn = Figure | str

STEPS = "learner steps"
PER_ROW = 3
FREQUENCY, SUBSETS, THRESHOLDS = "delay v and period m", "buffer subsets", "thresholds"
COLUMN_OF = {
    "cadence.weight_sync_interval": FREQUENCY,
    "cadence.reevaluation_interval": FREQUENCY,
    "algorithm.use_x2": SUBSETS,
    "algorithm.use_x3": SUBSETS,
    "algorithm.threshold_schedule": THRESHOLDS,
    "algorithm.c1": THRESHOLDS,
    "algorithm.c2_range": THRESHOLDS,
    "algorithm.c3_range": THRESHOLDS,
    "algorithm.x3_exactly_half": THRESHOLDS,
}
"""Setting -> column of figure 6 in which a method that differs in it belongs."""


def training_reward(compared: Compared) -> Drawn:
    return _single("mean reward of fresh responses", [reward(method) for method in compared.methods])


def held_out(compared: Compared) -> str:
    """Axis label: "held-out accuracy", or "held-out mean reward" with partial credit."""
    runs = [run for method in compared.methods for run in method.runs]
    return f"held-out {measure(runs, compared.splits)}"


def pairs(compared: Compared) -> Drawn:
    """Figure 5: each method next to the reference, and BAPO next to DAPO where both are there."""
    splits, chosen = compared.own_splits, [(one.method, one.reference) for one in contrasts(compared)]
    if not splits or not chosen:
        return "requires two methods with held-out evaluations"
    panels = {f"{a.label} - {b.label}": [average_accuracy(m, splits) for m in (a, b)] for a, b in chosen}
    return _panels(panels, held_out(compared), star=True)


def ablations(compared: Compared) -> Drawn:
    """Figure 6: variants of BAPO by what they change."""
    whole = [method for method in compared.methods if method.config.algorithm.composer == "bapo"]
    if not compared.own_splits or len(whole) < 2:
        return "requires BAPO and variants that differ in v, m, X2, X3 or thresholds"
    base = next((method for method in whole if method.name == "bapo"), whole[0])
    columns: dict[str, list[Method]] = {}
    for method in whole:
        found = {COLUMN_OF[key] for key in changed_keys(base, method) if key in COLUMN_OF}
        if len(found) == 1:
            columns.setdefault(found.pop(), [base]).append(method)
    if not columns:
        return f"no method differs from {base.label} only in v, m, X2, X3 or thresholds"
    panels = {name: [average_accuracy(m, compared.own_splits) for m in own] for name, own in columns.items()}
    return _panels(panels, held_out(compared))


def rollouts(compared: Compared) -> Drawn:
    return _single("responses for training", [cumulative_rollouts(method) for method in compared.methods])


def filters(compared: Compared) -> Drawn:
    """Figure 10: BAPO under its online filters: gradient norm and accuracy."""
    whole = [method for method in compared.methods if method.config.algorithm.composer == "bapo"]
    base = next((method for method in whole if method.name == "bapo"), None)
    if base is None:
        return "requires a method named bapo and others with a different online filter"
    filtered = [m for m in whole if changed_keys(base, m) == {"algorithm.online_filter"}]
    if not filtered:
        return f"no method differs from {base.label} only in its online filter"
    own = [base, *filtered]
    panels = {"gradient norm": [of_metric(method, lambda row: row["grad_norm"]) for method in own]}
    if compared.own_splits:
        panels[held_out(compared)] = [average_accuracy(method, compared.own_splits) for method in own]
    return _panels(panels, "", star=held_out(compared))


def dynamics(compared: Compared) -> Drawn:
    """Figure 11: reward, entropy and response length."""
    methods = compared.methods
    panels = {
        "training reward": [reward(method) for method in methods],
        "entropy, nats per token": [of_metric(method, lambda row: row["entropy"]) for method in methods],
        "tokens per response": [response_length(method) for method in methods],
    }
    return _panels(panels, "")


def test_curves(compared: Compared) -> Drawn:
    """Figure 12: accuracy of each held-out split."""
    if not compared.splits:
        return "no held-out split was evaluated in all runs"
    return _panels(
        {s: [accuracy(method, s) for method in compared.methods] for s in compared.splits}, held_out(compared)
    )


def with_critic(compared: Compared) -> Drawn:
    """Figure 16: batch adaptation on PPO, which has a critic, against PPO."""
    actors = [method for method in compared.methods if method.config.loss.advantage == "gae"]
    if len(actors) < 2 or not compared.own_splits:
        return "requires PPO and BA-PPO (methods with a critic)"
    panels = {"with a critic": [average_accuracy(method, compared.own_splits) for method in actors]}
    return _panels(panels, held_out(compared), star=True)


def draw(axes: Axes, lines: Sequence[Series | None], *, star: bool = False) -> None:
    """Lines with the range of their seeds; a star on each highest point."""
    for index, line in enumerate(lines):
        if line is None:
            continue
        style = line_style(index)
        marker: dict[str, Any] = {"marker": "o", "markersize": 3} if len(line.steps) < 12 else {}
        axes.plot(line.steps, line.mean, linewidth=1.6, label=line.label, **style, **marker)
        if line.low != line.high:
            axes.fill_between(line.steps, line.low, line.high, color=style["color"], alpha=0.12, linewidth=0)
        if star:
            step, value = line.best
            axes.plot([step], [value], marker="*", markersize=10, color=style["color"], linestyle="none")


def _single(y_label: str, lines: Sequence[Series | None]) -> Drawn:
    return _panels({"": lines}, y_label)


def _panels(panels: Mapping[str, Sequence[Series | None]], y_label: str, *, star: bool | str = False) -> Drawn:
    """Small pictures next to each other, with one legend below when all have the same lines."""
    panels = {title: lines for title, lines in panels.items() if any(lines)}
    if not panels:
        return "not in the records"
    names = [[line.label for line in lines if line] for lines in panels.values()]
    is_shared = all(own == names[0] for own in names)
    legend_rows = -(-len(names[0]) // 4) if is_shared else 0
    width, height = (7.2, 2.5) if len(panels) > 1 else (6.4, 3.2)
    figure, flat = _grid(len(panels), width=width, height=height, more=0.22 * legend_rows)
    for axes, (title, lines) in zip(flat, panels.items(), strict=True):
        draw(axes, lines, star=star is True or star == title)
        label(axes, STEPS, y_label, title)
        if not is_shared:
            axes.legend(fontsize=7, loc="best")
    if is_shared:
        _shared_legend(figure, flat[0], ncols=4, fontsize=8)
    return figure


def _grid(
    num: int, *, width: float, height: float, more: float = 0.0, per_row: int = PER_ROW
) -> tuple[Figure, list[Axes]]:
    """A figure with `num` axes, up to `per_row` per row of this height in inches, and `more` inches for a legend."""
    columns = min(per_row, num)
    rows = -(-num // columns)
    figure, cells = grid(rows, columns, size=(width, height * rows + more))
    flat = [axes for row in cells for axes in row]
    for axes in flat[num:]:
        axes.set_axis_off()
    return figure, flat[:num]


def _shared_legend(figure: Figure, axes: Axes, **settings: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", **settings)


MAX_METHODS = 4
FAVOURED = ("bapo", "dapo")
BETTER, WORSE = LINE_COLORS[0], RED
"""Of the two triangles of a migration matrix: both as strong, so that a loss is seen as well as a gain."""


def before_and_after(compared: Compared) -> Drawn:
    """Figure 1: held-out prompts by right responses, base model against the reference method."""
    method = compared.reference
    panels = {split: both for split in compared.splits if (both := _before_after(method, split))}
    if not panels:
        return "no held-out split was evaluated before and after training"
    figure, cells = _grid(len(panels), width=3.6 * max(2, len(panels)), height=2.8, per_row=len(panels))
    for axes, (split, (before, after)) in zip(cells, panels.items(), strict=True):
        size = len(before) - 1
        for offset, shares, alpha, name in ((-0.2, before, 0.45, "before"), (0.2, after, 1.0, f"after {method.label}")):
            colors = [RED if k == 0 else COLORS["x1"] for k in range(size + 1)]
            bars = axes.bar([k + offset for k in range(size + 1)], shares, width=0.38, color=colors, alpha=alpha)
            bars[min(1, size)].set_label(name)
        axes.set_xticks(range(size + 1), [f"{k}/{size}" for k in range(size + 1)])
        label(axes, "correct responses", "share of prompts", split)
        axes.legend(fontsize=7)
    return figure


def training_bins(compared: Compared) -> Drawn:
    """Figure 7: training prompts by right responses, visit after visit."""
    bins = {method.label: _summed([bins_by_epoch(run) for run in method.runs]) for method in compared.methods}
    if max(len(visits) for visits in bins.values()) < 2:
        return "no training prompt was seen twice: the run is shorter than an epoch"
    return _stacks({name: {f"visit {i}": row for i, row in enumerate(v, 1)} for name, v in bins.items()})


def held_out_stacks(compared: Compared) -> Drawn:
    """Figure 13: held-out prompts by right responses, before and after training, for each method."""
    if not compared.splits:
        return "no held-out split was evaluated in all runs"
    panels: dict[str, dict[str, list[int]]] = {}
    for split in compared.splits:
        size = compared.reference.config.evaluation.samples_of(split)
        measured = {name: [run.before(split) for run in runs] for name, runs in named_bases(compared).items()}
        measured |= {method.label: [run.after(split) for run in method.runs] for method in compared.methods}
        rows = {name: _histogram(found, size) for name, found in measured.items()}
        panels[split] = {name: row for name, row in rows.items() if row}
    return _stacks({split: rows for split, rows in panels.items() if rows}, per_row=2)


def compositions(compared: Compared) -> Drawn:
    """Figure 8: groups of each origin per step, against B."""
    return _areas(compared.methods, normalised=False)


def shares(compared: Compared) -> Drawn:
    """Figure 14: the same as shares of the batch."""
    return _areas(compared.methods, normalised=True)


def migrations(compared: Compared) -> Drawn:
    """Figure 15: the same prompts at the paper's three steps, with chance next to them, for up to four methods."""
    panels: dict[str, Matrix | None] = {}
    methods = chosen(compared)
    if compared.own_splits:
        for method in methods:
            steps = max(run.num_steps for run in method.runs)
            for look in looks(method.runs, compared.own_splits):
                panels[f"{method.label}, step {look.step} of {steps}"] = look.matrix
    for split in compared.splits:
        for name, runs in named_bases(compared).items():
            panels[f"chance: {name} twice, {split}"] = floor_matrix(runs, split)
    for method in methods:
        panels[f"{method.label}, training prompts"] = training_matrix(method.runs)
    found = {title: matrix for title, matrix in panels.items() if matrix is not None}
    if not found:
        return "no prompt was seen twice"
    figure, flat = _grid(len(found), width=7.2, height=2.75)
    for axes, (title, matrix) in zip(flat, found.items(), strict=True):
        _squares(axes, matrix, title)
    return figure


def chosen(compared: Compared) -> list[Method]:
    """The methods of a figure that has several pictures per method: the reference, BAPO, DAPO, then the others."""
    first = [compared.reference.name, *FAVOURED]
    ranked = sorted(compared.methods, key=lambda m: first.index(m.name) if m.name in first else len(first))
    return ranked[:MAX_METHODS]


def _squares(axes: Axes, matrix: Matrix, title: str) -> None:
    """One matrix: color says better or worse, strength how many (logarithmic), and each cell has its count."""
    size = len(matrix.counts)
    most = math.log1p(max(max(row) for row in matrix.counts))
    for first, row in enumerate(matrix.counts):
        for last, count in enumerate(row):
            if not count:
                continue
            color = BETTER if last > first else WORSE if last < first else LINE_COLORS[-1]
            strength = 0.15 + 0.75 * math.log1p(count) / most
            axes.bar(last, 1.0, bottom=first - 0.5, width=1.0, color=color, alpha=strength, linewidth=0)
            axes.text(last, first, str(count), ha="center", va="center", fontsize=5.5, color=INK)
    ticks = [f"{k}/{size - 1}" if size < 6 or k % 2 == 0 else "" for k in range(size)]
    axes.set_xticks(range(size), ticks, fontsize=6)
    axes.set_yticks(range(size), ticks, fontsize=6)
    axes.set_xlim(-0.5, size - 0.5)
    axes.set_ylim(size - 0.5, -0.5)  # 0/n at the top: what became worse is the lower triangle, as in the paper
    axes.set_aspect("equal")
    words = f"better {matrix.better / matrix.total:.0%}, worse {matrix.worse / matrix.total:.0%}"
    label(axes, "later", "at first", f"{title}\n{words}")
    axes.title.set_fontsize(7)
    axes.grid(visible=False)


def _areas(methods: Sequence[Method], *, normalised: bool) -> Drawn:
    figure, flat = _grid(len(methods), width=7.2, height=2.3, more=0.3)
    for axes, method in zip(flat, methods, strict=True):
        found = parts(method)
        steps = next(iter(found.values())).steps
        values = {origin: list(line.mean) for origin, line in found.items()}
        if normalised:
            totals = [sum(column) or 1.0 for column in zip(*values.values(), strict=True)]
            values = {o: [v / t for v, t in zip(line, totals, strict=True)] for o, line in values.items()}
        colors = [COLORS[origin.value] for origin in values]
        axes.stackplot(steps, *values.values(), colors=colors, labels=[o.value.upper() for o in values], linewidth=0)
        if not normalised:
            axes.axhline(method.config.algorithm.batch_size, color=RED, linestyle="--", linewidth=1.0, label="B")
        label(axes, STEPS, "share of the batch" if normalised else "groups", method.label)
        axes.title.set_fontsize(8)
    _shared_legend(figure, flat[0], ncols=len(Origin) + 1, fontsize=8)
    return figure


def _stacks(panels: dict[str, dict[str, list[int]]], per_row: int = PER_ROW) -> Drawn:
    """Horizontal bars of shares by right responses: red for none, then from light to dark."""
    if not panels:
        return "no prompt was evaluated with these settings"
    longest = max(len(rows) for rows in panels.values())
    figure, flat = _grid(len(panels), width=7.2, height=0.9 + 0.24 * longest, more=0.4, per_row=per_row)
    for axes, (title, rows) in zip(flat, panels.items(), strict=True):
        names = list(rows)
        size = len(rows[names[0]])
        left = [0.0] * len(names)
        for k in range(size):
            widths = [rows[name][k] / max(1, sum(rows[name])) for name in names]
            color, alpha = (RED, 0.9) if k == 0 else (COLORS["x1"], 0.15 + 0.85 * k / (size - 1))
            axes.barh(
                range(len(names)), widths, left=left, color=color, alpha=alpha, label=f"{k}/{size - 1}", height=0.8
            )
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for place, name in enumerate(names):
            none = rows[name][0] / max(1, sum(rows[name]))
            axes.text(none / 2, place, f"{none:.0%}", ha="center", va="center", fontsize=6, color=INK)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        label(axes, "share of prompts", "", title)
        axes.grid(visible=False)
    _shared_legend(figure, flat[0], ncols=9, fontsize=7, title="correct responses")
    return figure


def _before_after(method: Method, split: str) -> tuple[list[float], list[float]] | None:
    matrix = held_out_matrix(method.runs, split)
    if matrix is None:
        return None
    before = [sum(row) / matrix.total for row in matrix.counts]
    after = [sum(column) / matrix.total for column in zip(*matrix.counts, strict=True)]
    return before, after


def _histogram(measured: Sequence[Row | None], size: int) -> list[int]:
    """[k] prompts with k right responses, all measurements together; empty without any."""
    bins = [k for row in measured for k in bins_of(row).values()]
    return [bins.count(k) for k in range(size + 1)] if bins else []


def _summed(runs: Sequence[list[list[int]]]) -> list[list[int]]:
    """[visit][k] over all runs; visits that not every run has are left out."""
    return [[sum(row) for row in zip(*visits, strict=True)] for visits in zip(*runs, strict=False)]


@dataclass(frozen=True, slots=True)
class Entry:
    number: int
    title: str
    ours: str
    """What ours shows, and how it differs."""
    draw: Callable[[Compared], Drawn]

    @property
    def key(self) -> str:
        return f"figure-{self.number:02d}"


CATALOGUE = (
    Entry(1, "Prompts per accuracy group before and after the baseline", "held-out problems by right responses, base "
          "model and first method; the paper has training prompts", before_and_after),
    Entry(4, "Training curves of reward", "mean reward of all fresh responses, before the filter; mean of a twelfth of "
          "the steps; range over seeds", training_reward),
    Entry(5, "Test curves, method by method", "mean of the held-out splits at their own temperature; a star "
          "is the best measurement; range over seeds", pairs),
    Entry(6, "Ablations", "variants of BAPO that change one thing, by what they change: delay and period, subsets, "
          "thresholds", ablations),
    Entry(7, "Accuracy bins of training prompts", "fresh groups by correct responses at each prompt's first, second "
          "... visit; red: none correct", training_bins),
    Entry(8, "Batch composition", "groups of each origin per step, mean over seeds, and B", compositions),
    Entry(9, "Cumulative rollouts", "responses sampled for training, fresh and re-evaluated, over steps", rollouts),
    Entry(10, "Online filters", "gradient norm before clipping and mean over held-out splits of BAPO under each online "
          "filter", filters),
    Entry(11, "Training dynamics", "reward, entropy of trained tokens and tokens per fresh response", dynamics),
    Entry(12, "Test curves by benchmark", "mean reward of each held-out split; evaluations on fewer prompts are "
          "included by their change on the common ones", test_curves),
    Entry(13, "Accuracy bins, base model and methods", "held-out problems by correct responses before and after "
          "training; the paper shows training sets of two tasks", held_out_stacks),
    Entry(14, "Shares of X1, X2 and X3", "figure 8 as shares of the batch", shares),
    Entry(15, "Accuracy migration", "the same held-out prompts (the paper: 1,000 training prompts), before training "
          "against the measurements that are nearest to the paper's steps 150, 300 and 471 of 471, up to four methods; "
          "training prompts from their first visit to their last; blue better, red worse, equally strong, counts "
          "logarithmic; the base model measured twice shows how much of it is chance", migrations),
    Entry(16, "Batch adaptation with a critic", "held-out curves of methods with a critic", with_critic),
)  # fmt: skip


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to window - 1 values before it."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means
