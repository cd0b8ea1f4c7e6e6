"""Figures of lines: training (4, 11), held-out curves (5, 12, 16), ablations (6, 10), rollouts (9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bapo.analysis.compare import series
from bapo.analysis.compare.gather import Compared, Method, changed_keys, contrasts
from bapo.analysis.compare.series import Series
from bapo.analysis.report.drawing import Axes, Figure, grid, label, line_style

Drawn = Figure | str
"""A figure, or why these records hold none."""

STEPS = "learner steps"
ACCURACY = "held-out accuracy"
PANELS_PER_ROW = 3
FREQUENCY, SUBSETS, THRESHOLDS = "delay v and period m", "buffer subsets", "thresholds"
COLUMN_OF = {
    "cadence.v": FREQUENCY,
    "cadence.m": FREQUENCY,
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
    """Figure 4."""
    return _single("mean reward of fresh responses", [series.reward(method) for method in compared.methods])


def pairs(compared: Compared) -> Drawn:
    """Figure 5: each method beside the reference, and BAPO beside DAPO where both are there."""
    splits, chosen = compared.splits, [(one.method, one.reference) for one in contrasts(compared)]
    if not splits or not chosen:
        return "it needs two methods with held-out measurements"
    panels = {f"{a.label} - {b.label}": [series.average_accuracy(m, splits) for m in (a, b)] for a, b in chosen}
    return _panels(panels, ACCURACY, star=True)


def ablations(compared: Compared) -> Drawn:
    """Figure 6: variants of BAPO by what they change."""
    whole = [method for method in compared.methods if method.config.algorithm.name == "bapo"]
    if not compared.splits or len(whole) < 2:
        return "it needs BAPO and variants of it that differ in v, m, X2, X3 or thresholds"
    base = next((method for method in whole if method.name == "bapo"), whole[0])
    columns: dict[str, list[Method]] = {}
    for method in whole:
        found = {COLUMN_OF[key] for key in changed_keys(base, method) if key in COLUMN_OF}
        if len(found) == 1:
            columns.setdefault(found.pop(), [base]).append(method)
    if not columns:
        return f"no method differs from {base.label} in v, m, X2, X3 or thresholds alone"
    panels = {name: [series.average_accuracy(m, compared.splits) for m in own] for name, own in columns.items()}
    return _panels(panels, ACCURACY)


def rollouts(compared: Compared) -> Drawn:
    """Figure 9."""
    return _single("responses for training", [series.cumulative_rollouts(method) for method in compared.methods])


def filters(compared: Compared) -> Drawn:
    """Figure 10: BAPO under its online filters: gradient norm and accuracy."""
    whole = [method for method in compared.methods if method.config.algorithm.name == "bapo"]
    base = next((method for method in whole if method.name == "bapo"), None)
    if base is None:
        return "it needs a method named bapo and others with another online filter"
    filtered = [m for m in whole if changed_keys(base, m) == {"algorithm.online_filter"}]
    if not filtered:
        return f"no method differs from {base.label} in its online filter alone"
    own = [base, *filtered]
    panels = {"gradient norm": [series.of_metric(method, lambda row: row["grad_norm"]) for method in own]}
    if compared.splits:
        panels[ACCURACY] = [series.average_accuracy(method, compared.splits) for method in own]
    return _panels(panels, "", star=ACCURACY)


def dynamics(compared: Compared) -> Drawn:
    """Figure 11: reward, entropy and response length."""
    methods = compared.methods
    panels = {
        "training reward": [series.reward(method) for method in methods],
        "entropy, nats per token": [series.of_metric(method, lambda row: row["entropy"]) for method in methods],
        "tokens per response": [series.response_length(method) for method in methods],
    }
    return _panels(panels, "")


def test_curves(compared: Compared) -> Drawn:
    """Figure 12: accuracy of each held-out split."""
    if not compared.splits:
        return "no held-out split was measured in all runs"
    return _panels({s: [series.accuracy(method, s) for method in compared.methods] for s in compared.splits}, ACCURACY)


def with_critic(compared: Compared) -> Drawn:
    """Figure 16: batch adaptation on PPO, which has a critic, against PPO."""
    actors = [method for method in compared.methods if _has_critic(method)]
    if len(actors) < 2 or not compared.splits:
        return "it needs PPO and BA-PPO (methods with a critic), and no run here has one"
    panels = {"with a critic": [series.average_accuracy(method, compared.splits) for method in actors]}
    return _panels(panels, ACCURACY, star=True)


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
    """Small pictures beside each other, with one legend below when all have the same lines."""
    panels = {title: lines for title, lines in panels.items() if any(lines)}
    if not panels:
        return "the records have no such values"
    columns = min(PANELS_PER_ROW, len(panels))
    rows = -(-len(panels) // columns)
    names = [[line.label for line in lines if line] for lines in panels.values()]
    is_shared = all(own == names[0] for own in names)
    legend_rows = -(-len(names[0]) // 4) if is_shared else 0
    size = (7.2 if columns > 1 else 6.4, (2.5 if columns > 1 else 3.2) * rows + 0.22 * legend_rows)
    figure, cells = grid(rows, columns, size=size)
    flat = [axes for row in cells for axes in row]
    for axes, (title, lines) in zip(flat, panels.items(), strict=False):
        draw(axes, lines, star=star is True or star == title)
        label(axes, STEPS, y_label, title)
        if not is_shared:
            axes.legend(fontsize=7, loc="best")
    for axes in flat[len(panels) :]:
        axes.set_axis_off()
    if is_shared:
        handles, labels = flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, ncols=4, loc="outside lower center", fontsize=8)
    return figure


def _has_critic(method: Method) -> bool:
    return method.config.loss.advantage == "gae"
