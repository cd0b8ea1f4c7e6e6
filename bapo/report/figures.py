"""The figures of one run's report as SVG that lies in the page: no script, no font and no host from outside."""

from __future__ import annotations

from collections.abc import Sequence

from bapo.report.data import Bins, Composition, Curve, smoothed
from bapo.report.drawing import COLOURS, LINE_COLOURS, RED, Axes, Figure, canvas, settings, svg

SMOOTHING_SHARE = 20
"""The bold reward line averages one in so many of all steps."""


def composition_figure(parts: Composition) -> str:
    """X1, X2, X3 stacked, against the line of B (Fig. 8)."""
    with settings():
        figure, axes = canvas("learner step", "groups in the batch")
        bottom = [0] * len(parts.steps)
        for origin, sizes in (("x1", parts.x1), ("x2", parts.x2), ("x3", parts.x3)):
            axes.bar(parts.steps, sizes, bottom=bottom, width=1.0, color=COLOURS[origin], label=origin.upper())
            bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
        axes.axhline(parts.batch_size, color=RED, linestyle="--", linewidth=1.2, label=f"B = {parts.batch_size}")
        axes.set_ylim(0, parts.batch_size * 1.08)
        return _svg(figure, axes)


def reward_figure(curve: Curve) -> str:
    """Mean reward of all fresh responses, each step and smoothed (Fig. 4)."""
    with settings():
        figure, axes = canvas("learner step", "mean reward")
        axes.plot(curve.steps, curve.values, color=COLOURS["x1"], alpha=0.35, linewidth=1.0, label="each step")
        window = max(1, len(curve.values) // SMOOTHING_SHARE)
        if window > 1:
            label = f"mean of {window} steps"
            axes.plot(curve.steps, smoothed(curve.values, window), color=COLOURS["x1"], linewidth=2.0, label=label)
        return _svg(figure, axes)


def bins_figure(bins: Bins) -> str:
    """Fresh groups by right answers, first against last quarter (Fig. 7); groups without one are red."""
    with settings():
        size = len(bins.first) - 1
        figure, axes = canvas("right answers in the group", "share of fresh groups")
        for offset, shares, alpha, name in ((-0.2, bins.first, 0.45, "first"), (0.2, bins.last, 1.0, "last")):
            colours = [RED if k == 0 else COLOURS["x1"] for k in range(size + 1)]
            bars = axes.bar([k + offset for k in range(size + 1)], shares, width=0.38, color=colours, alpha=alpha)
            # One bar in the legend stands for its quarter; the first is red, so the second.
            bars[min(1, size)].set_label(f"{name} quarter of the steps")
        axes.set_xticks(range(size + 1), [f"{k}/{size}" for k in range(size + 1)])
        return _svg(figure, axes)


def held_out_figure(curves: Sequence[Curve]) -> str:
    """Held-out accuracy with 95 % intervals."""
    with settings():
        figure, axes = canvas("learner steps behind the weights", "held-out accuracy")
        for index, curve in enumerate(curves):
            below = [value - low for value, low in zip(curve.values, curve.low, strict=True)]
            above = [high - value for value, high in zip(curve.values, curve.high, strict=True)]
            axes.errorbar(
                curve.steps,
                curve.values,
                yerr=[below, above],
                color=LINE_COLOURS[index % len(LINE_COLOURS)],
                marker="o",
                markersize=4,
                capsize=3,
                linewidth=1.6,
                label=curve.name,
            )
        axes.set_ylim(bottom=0)
        return _svg(figure, axes)


def meter_figure(curves: Sequence[Curve], y_label: str, limit: float | None) -> str:
    """One line per subset, with a band up to its `high` where it has one, and the limit of the warnings."""
    with settings():
        figure, axes = canvas("learner step", y_label)
        for curve in curves:
            colour = COLOURS[curve.name]
            axes.plot(curve.steps, curve.values, color=colour, linewidth=1.4, marker=".", label=curve.name.upper())
            if curve.high:
                axes.fill_between(curve.steps, curve.values, curve.high, color=colour, alpha=0.15, linewidth=0)
        if limit is not None:
            axes.axhline(limit, color=RED, linestyle="--", linewidth=1.2, label=f"limit {limit:g}")
        axes.set_ylim(bottom=0)
        return _svg(figure, axes)


def _svg(figure: Figure, axes: Axes) -> str:
    axes.legend(ncols=4, loc="upper left", bbox_to_anchor=(0, 1.14), borderaxespad=0)
    return svg(figure)
