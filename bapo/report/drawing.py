"""The one door to matplotlib: settings, empty figures, and figures as SVG for a page, PNG and PDF for a file.

Lines and texts of a page's figures take the colour of the page around them, so that they fit a light and a dark page.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:
    Axes = Figure = Any

SIZE_IN = (7.2, 3.0)
INK = "#010203"
"""Stands for the page's text colour: replaced by `currentColor` in the SVG; as good as black in a file."""
COLOURS = {"x1": "#3b82f6", "x2": "#f59e0b", "x3": "#22a06b"}
RED = "#ef4444"
LINE_COLOURS = ("#3b82f6", "#f59e0b", "#22a06b", "#a855f7", "#ec4899", "#0ea5b7", "#84703c", "#7c8694")
LINE_STYLES = ("-", "--", ":", "-.")
PNG_DPI = 160

SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # texts stay texts: small, searchable, in the page's font
    "svg.hashsalt": "bapo",  # the same records give the same page
    "pdf.fonttype": 42,  # texts stay texts
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def settings() -> Any:
    """A context in which figures look alike. Raises: ConfigError when matplotlib is not installed."""
    try:
        import matplotlib  # here: only reports need it, and it takes half a second
    except ImportError as error:
        raise ConfigError("figures need matplotlib, which is not installed: pip install 'bapo[records]'") from error
    return matplotlib.rc_context(SETTINGS)


def canvas(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """One empty figure with one pair of axes."""
    figure, ((axes,),) = grid(1, 1, size=SIZE_IN)
    label(axes, x_label, y_label)
    return figure, axes


def grid(rows: int, columns: int, *, size: tuple[float, float]) -> tuple[Figure, list[list[Axes]]]:
    """One empty figure with rows x columns of axes."""
    from matplotlib.figure import Figure as New

    figure = New(figsize=size, layout="constrained")
    return figure, [list(row) for row in figure.subplots(rows, columns, squeeze=False)]


def label(axes: Axes, x_label: str, y_label: str, title: str = "") -> None:
    """Words and a quiet grid."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def line_style(index: int) -> dict[str, Any]:
    """Colour and dashes of the index-th line of a figure: 32 that differ."""
    dashes = LINE_STYLES[index // len(LINE_COLOURS) % len(LINE_STYLES)]
    return {"color": LINE_COLOURS[index % len(LINE_COLOURS)], "linestyle": dashes}


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element that takes its colours and its width from the page."""
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


def write_files(figure: Figure, stem: Path) -> list[Path]:
    """STEM.png and STEM.pdf, on white. Raises: StorageError."""
    paths = [stem.with_suffix(".png"), stem.with_suffix(".pdf")]
    metadata: list[dict[str, Any]] = [{"Software": None}, {"CreationDate": None, "Creator": None, "Producer": None}]
    for path, facts in zip(paths, metadata, strict=True):
        try:
            figure.savefig(path, dpi=PNG_DPI, facecolor="white", metadata=facts)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}") from error
    return paths
