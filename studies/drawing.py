"""The one door to matplotlib: settings, empty figures, and figures as PNG and PDF."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo.core.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:
    Axes = Figure = Any

INK = "#010203"
COLORS = {"x1": "#0072B2", "x2": "#E69F00", "x3": "#009E73"}
RED = "#ef4444"
LINE_COLORS = ("#0072B2", "#E69F00", "#009E73", "#a855f7", "#ec4899", "#0ea5b7", "#84703c", "#7c8694")
LINE_STYLES = ("-", "--", ":", "-.")
PNG_DPI = 160

SETTINGS: dict[Any, Any] = {
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


def grid(rows: int, columns: int, *, size: tuple[float, float]) -> tuple[Figure, list[list[Axes]]]:
    from matplotlib.figure import Figure as New

    figure = New(figsize=size, layout="constrained")
    return figure, [list(row) for row in figure.subplots(rows, columns, squeeze=False)]


def label(axes: Axes, x_label: str, y_label: str, title: str = "") -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def line_style(index: int) -> dict[str, Any]:
    """Color and dashes of the index-th line of a figure: 32 that differ."""
    dashes = LINE_STYLES[index // len(LINE_COLORS) % len(LINE_STYLES)]
    return {"color": LINE_COLORS[index % len(LINE_COLORS)], "linestyle": dashes}


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
