"""The figures of a report as SVG that lies in the page: no script, no font and no host from outside.

Lines and texts take the colour of the page around them, so that a figure fits a light and a dark page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bapo.report.data import Bins, Composition, Curve, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_IN = (7.2, 3.0)
INK = "#010203"
"""Stands for the page's text colour: replaced by `currentColor` in the SVG."""
COLOURS = {"x1": "#3b82f6", "x2": "#f59e0b", "x3": "#22a06b"}
RED = "#ef4444"
SPLIT_COLOURS = ("#3b82f6", "#f59e0b", "#22a06b", "#a855f7", "#ec4899")
SMOOTHING_SHARE = 20
"""The bold reward line averages one in so many of all steps."""

SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # texts stay texts: small, searchable, in the page's font
    "svg.hashsalt": "bapo",  # the same records give the same page
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def composition_figure(parts: Composition) -> str:
    """X1, X2, X3 stacked, against the line of B (Fig. 8)."""
    with _settings():
        figure, axes = _canvas("learner step", "groups in the batch")
        bottom = [0] * len(parts.steps)
        for origin, sizes in (("x1", parts.x1), ("x2", parts.x2), ("x3", parts.x3)):
            axes.bar(parts.steps, sizes, bottom=bottom, width=1.0, color=COLOURS[origin], label=origin.upper())
            bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
        axes.axhline(parts.batch_size, color=RED, linestyle="--", linewidth=1.2, label=f"B = {parts.batch_size}")
        axes.set_ylim(0, parts.batch_size * 1.08)
        return _svg(figure, axes)


def reward_figure(curve: Curve) -> str:
    """Mean reward of all fresh responses, each step and smoothed (Fig. 4)."""
    with _settings():
        figure, axes = _canvas("learner step", "mean reward")
        axes.plot(curve.steps, curve.values, color=COLOURS["x1"], alpha=0.35, linewidth=1.0, label="each step")
        window = max(1, len(curve.values) // SMOOTHING_SHARE)
        if window > 1:
            label = f"mean of {window} steps"
            axes.plot(curve.steps, smoothed(curve.values, window), color=COLOURS["x1"], linewidth=2.0, label=label)
        return _svg(figure, axes)


def bins_figure(bins: Bins) -> str:
    """Fresh groups by right answers, first against last quarter (Fig. 7); groups without one are red."""
    with _settings():
        size = len(bins.first) - 1
        figure, axes = _canvas("right answers in the group", "share of fresh groups")
        for offset, shares, alpha, name in ((-0.2, bins.first, 0.45, "first"), (0.2, bins.last, 1.0, "last")):
            colours = [RED if k == 0 else COLOURS["x1"] for k in range(size + 1)]
            bars = axes.bar([k + offset for k in range(size + 1)], shares, width=0.38, color=colours, alpha=alpha)
            # One bar in the legend stands for its quarter; the first is red, so the second.
            bars[min(1, size)].set_label(f"{name} quarter of the steps")
        axes.set_xticks(range(size + 1), [f"{k}/{size}" for k in range(size + 1)])
        return _svg(figure, axes)


def held_out_figure(curves: Sequence[Curve]) -> str:
    """Held-out accuracy with 95 % intervals."""
    with _settings():
        figure, axes = _canvas("learner steps behind the weights", "held-out accuracy")
        for index, curve in enumerate(curves):
            below = [value - low for value, low in zip(curve.values, curve.low, strict=True)]
            above = [high - value for value, high in zip(curve.values, curve.high, strict=True)]
            axes.errorbar(
                curve.steps,
                curve.values,
                yerr=[below, above],
                color=SPLIT_COLOURS[index % len(SPLIT_COLOURS)],
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
    with _settings():
        figure, axes = _canvas("learner step", y_label)
        for curve in curves:
            colour = COLOURS[curve.name]
            axes.plot(curve.steps, curve.values, color=colour, linewidth=1.4, marker=".", label=curve.name.upper())
            if curve.high:
                axes.fill_between(curve.steps, curve.values, curve.high, color=colour, alpha=0.15, linewidth=0)
        if limit is not None:
            axes.axhline(limit, color=RED, linestyle="--", linewidth=1.2, label=f"limit {limit:g}")
        axes.set_ylim(bottom=0)
        return _svg(figure, axes)


def _settings() -> Any:
    import matplotlib  # here: only a report needs it, and it takes half a second

    return matplotlib.rc_context(SETTINGS)


def _canvas(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_IN, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure, axes: Axes) -> str:
    """The figure as an `<svg>` element that takes its colours and its width from the page."""
    axes.legend(ncols=4, loc="upper left", bbox_to_anchor=(0, 1.14), borderaxespad=0)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # An <svg> inside HTML needs no namespaces; without them no address of any host is in the page.
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'<svg([^>]*?)\swidth="[^"]*"', r"<svg\1", text, count=1)
    text = re.sub(r'<svg([^>]*?)\sheight="[^"]*"', r"<svg\1", text, count=1)
    return text.replace(INK, "currentColor").replace("xlink:href", "href")
