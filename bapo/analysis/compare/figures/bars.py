"""Figures of bars and squares: accuracy bins (1, 7, 13), batches (8, 14), migration (15)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bapo.analysis.compare import series
from bapo.analysis.compare.figures.lines import STEPS, Drawn
from bapo.analysis.compare.gather import BASE_VERSION, Compared, Measured, Method
from bapo.analysis.compare.migration import (
    Matrix,
    bins_by_epoch,
    floor_matrix,
    held_out_bins,
    held_out_matrix,
    training_matrix,
)
from bapo.analysis.report.drawing import COLOURS, INK, LINE_COLOURS, RED, Axes, grid, label
from bapo.core.types import Origin

PER_ROW = 3
MOST_METHODS = 4
FAVOURED = ("bapo", "dapo")
BETTER, WORSE = LINE_COLOURS[0], RED
"""Of the two triangles of a migration matrix: both as strong, so that a loss is seen as well as a gain."""


def before_and_after(compared: Compared) -> Drawn:
    """Figure 1: held-out prompts by right responses, base model against the reference method."""
    method = compared.reference
    panels = {split: both for split in compared.splits if (both := _before_after(method, split))}
    if not panels:
        return "no held-out split was measured before and after training"
    figure, (cells,) = grid(1, len(panels), size=(3.6 * max(2, len(panels)), 2.8))
    for axes, (split, (before, after)) in zip(cells, panels.items(), strict=True):
        size = len(before) - 1
        for offset, shares, alpha, name in ((-0.2, before, 0.45, "before"), (0.2, after, 1.0, f"after {method.label}")):
            colours = [RED if k == 0 else COLOURS["x1"] for k in range(size + 1)]
            bars = axes.bar([k + offset for k in range(size + 1)], shares, width=0.38, color=colours, alpha=alpha)
            bars[min(1, size)].set_label(name)
        axes.set_xticks(range(size + 1), [f"{k}/{size}" for k in range(size + 1)])
        label(axes, "right responses", "share of prompts", split)
        axes.legend(fontsize=7)
    return figure


def training_bins(compared: Compared) -> Drawn:
    """Figure 7: training prompts by right responses, visit after visit."""
    bins = {method.label: _summed([bins_by_epoch(run) for run in method.runs]) for method in compared.methods}
    if max(len(visits) for visits in bins.values()) < 2:
        return "no training prompt came twice: the run is shorter than an epoch"
    return _stacks({name: {f"visit {i}": row for i, row in enumerate(v, 1)} for name, v in bins.items()})


def held_out_stacks(compared: Compared) -> Drawn:
    """Figure 13: held-out prompts by right responses, before and after training, for each method."""
    if not compared.splits:
        return "no held-out split was measured in all runs"
    runs = [run for method in compared.methods for run in method.runs]
    panels: dict[str, dict[str, list[int]]] = {}
    for split in compared.splits:
        rows = {"base model": _histogram(runs, split, BASE_VERSION)}
        rows |= {m.label: _histogram(m.runs, split, m.runs[0].num_steps + 1) for m in compared.methods}
        panels[split] = {name: row for name, row in rows.items() if row}
    return _stacks({split: rows for split, rows in panels.items() if rows}, per_row=2)


def compositions(compared: Compared) -> Drawn:
    """Figure 8: groups of each origin per step, against B."""
    return _areas(compared.methods, normalised=False)


def shares(compared: Compared) -> Drawn:
    """Figure 14: the same as shares of the batch."""
    return _areas(compared.methods, normalised=True)


def migrations(compared: Compared) -> Drawn:
    """Figure 15: from the bin at first to the bin at last, with chance beside it, for up to four methods."""
    panels: dict[str, Matrix | None] = {}
    methods = chosen(compared)
    runs = [run for method in compared.methods for run in method.runs]
    for split in compared.splits:
        panels[f"chance: base model twice, {split}"] = floor_matrix(runs, split)
        for method in methods:
            final = method.runs[0].num_steps + 1
            panels[f"{method.label}, {split}"] = held_out_matrix(method.runs, split, final)
    for method in methods:
        panels[f"{method.label}, training prompts"] = training_matrix(method.runs)
    found = {title: matrix for title, matrix in panels.items() if matrix is not None}
    if not found:
        return "no prompt was looked at twice"
    columns = min(PER_ROW, len(found))
    rows = -(-len(found) // columns)
    figure, cells = grid(rows, columns, size=(7.2, 2.75 * rows))
    flat = [axes for row in cells for axes in row]
    for axes, (title, matrix) in zip(flat, found.items(), strict=False):
        _squares(axes, matrix, title)
    for axes in flat[len(found) :]:
        axes.set_axis_off()
    return figure


def chosen(compared: Compared) -> list[Method]:
    """The methods of a figure that has several pictures per method: the reference, BAPO, DAPO, then the others."""
    first = [compared.reference.name, *FAVOURED]
    ranked = sorted(compared.methods, key=lambda m: first.index(m.name) if m.name in first else len(first))
    return ranked[:MOST_METHODS]


def _squares(axes: Axes, matrix: Matrix, title: str) -> None:
    """One matrix: colour says better or worse, strength how many (logarithmic), and each cell has its count."""
    size = len(matrix.counts)
    most = math.log1p(max(max(row) for row in matrix.counts))
    for first, row in enumerate(matrix.counts):
        for last, count in enumerate(row):
            if not count:
                continue
            colour = BETTER if last > first else WORSE if last < first else LINE_COLOURS[-1]
            strength = 0.15 + 0.75 * math.log1p(count) / most
            axes.bar(last, 1.0, bottom=first - 0.5, width=1.0, color=colour, alpha=strength, linewidth=0)
            axes.text(last, first, str(count), ha="center", va="center", fontsize=5.5, color=INK)
    ticks = [f"{k}/{size - 1}" if size < 6 or k % 2 == 0 else "" for k in range(size)]
    axes.set_xticks(range(size), ticks, fontsize=6)
    axes.set_yticks(range(size), ticks, fontsize=6)
    axes.set_xlim(-0.5, size - 0.5)
    axes.set_ylim(size - 0.5, -0.5)  # 0/n at the top: what became worse is the lower triangle, as in the paper
    axes.set_aspect("equal")
    words = f"better {matrix.better / matrix.total:.0%}, worse {matrix.worse / matrix.total:.0%}"
    label(axes, "at last", "at first", f"{title}\n{words}")
    axes.title.set_fontsize(7)
    axes.grid(visible=False)


def _areas(methods: Sequence[Method], *, normalised: bool) -> Drawn:
    columns = min(PER_ROW, len(methods))
    rows = -(-len(methods) // columns)
    figure, cells = grid(rows, columns, size=(7.2, 2.3 * rows + 0.3))
    flat = [axes for row in cells for axes in row]
    for axes, method in zip(flat, methods, strict=False):
        found = series.parts(method)
        steps = next(iter(found.values())).steps
        values = {origin: list(line.mean) for origin, line in found.items()}
        if normalised:
            totals = [sum(column) or 1.0 for column in zip(*values.values(), strict=True)]
            values = {o: [v / t for v, t in zip(line, totals, strict=True)] for o, line in values.items()}
        colours = [COLOURS[origin.value] for origin in values]
        axes.stackplot(steps, *values.values(), colors=colours, labels=[o.value.upper() for o in values], linewidth=0)
        if not normalised:
            axes.axhline(method.config.algorithm.batch_size, color=RED, linestyle="--", linewidth=1.0, label="B")
        label(axes, STEPS, "share of the batch" if normalised else "groups", method.label)
        axes.title.set_fontsize(8)
    for axes in flat[len(methods) :]:
        axes.set_axis_off()
    handles, labels = flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(Origin) + 1, loc="outside lower center", fontsize=8)
    return figure


def _stacks(panels: dict[str, dict[str, list[int]]], per_row: int = PER_ROW) -> Drawn:
    """Horizontal bars of shares by right responses: red for none, then from light to dark."""
    if not panels:
        return "no prompt was measured with these settings"
    columns = min(per_row, len(panels))
    lines = -(-len(panels) // columns)
    longest = max(len(rows) for rows in panels.values())
    figure, cells = grid(lines, columns, size=(7.2, (0.9 + 0.24 * longest) * lines + 0.4))
    flat = [axes for row in cells for axes in row]
    for axes, (title, rows) in zip(flat, panels.items(), strict=False):
        names = list(rows)
        size = len(rows[names[0]])
        left = [0.0] * len(names)
        for k in range(size):
            widths = [rows[name][k] / max(1, sum(rows[name])) for name in names]
            colour, alpha = (RED, 0.9) if k == 0 else (COLOURS["x1"], 0.15 + 0.85 * k / (size - 1))
            axes.barh(
                range(len(names)), widths, left=left, color=colour, alpha=alpha, label=f"{k}/{size - 1}", height=0.8
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
    for axes in flat[len(panels) :]:
        axes.set_axis_off()
    handles, labels = flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=9, loc="outside lower center", fontsize=7, title="right responses")
    return figure


def _before_after(method: Method, split: str) -> tuple[list[float], list[float]] | None:
    matrix = held_out_matrix(method.runs, split, method.runs[0].num_steps + 1)
    if matrix is None:
        return None
    before = [sum(row) / matrix.total for row in matrix.counts]
    after = [sum(column) / matrix.total for column in zip(*matrix.counts, strict=True)]
    return before, after


def _histogram(runs: Sequence[Measured], split: str, version: int) -> list[int]:
    bins = [k for run in runs for k in held_out_bins(run, split, version).values()]
    size = runs[0].config.evaluation.num_samples
    return [bins.count(k) for k in range(size + 1)] if bins else []


def _summed(runs: Sequence[list[list[int]]]) -> list[list[int]]:
    """[visit][k] over all runs; visits that not every run has are left out."""
    return [[sum(row) for row in zip(*visits, strict=True)] for visits in zip(*runs, strict=False)]
