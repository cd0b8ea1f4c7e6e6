"""Draw docs/images/results.png from the table of the study in docs/results.md: `python -m benchmarks.results_plot`.

Held-out accuracy of the base model and three methods at temperature 1, with 95 % intervals.
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

PAGE, PICTURE = Path("docs/results.md"), Path("docs/images/results.png")
METHODS = ("base model", "GRPO", "BAPO", "DAPO")
COLUMNS = {"CD-34 (3 or 4 numbers)": 3, "CD-4 (4 numbers)": 5}
COLORS = ("#999999", "#56B4E9", "#0072B2", "#E69F00")
ESTIMATE = re.compile(r"([\d.]+) \[([\d.]+), ([\d.]+)\]")


def estimates(method: str, column: int) -> tuple[float, float, float]:
    """(mean, low, high) in percent, from the row of a method."""
    rows = (line.split("|") for line in PAGE.read_text().splitlines() if line.startswith(f"| {method} |"))
    found = next(match for row in rows if (match := ESTIMATE.fullmatch(row[column].strip())))
    mean, low, high = map(float, found.groups())
    return mean, low, high


def main() -> None:
    """Draw and save."""
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 2.6), sharey=True, constrained_layout=True)
    for axis, (title, column) in zip(axes, COLUMNS.items(), strict=True):
        for at, (method, color) in enumerate(zip(METHODS, COLORS, strict=True)):
            mean, low, high = estimates(method, column)
            axis.bar(at, mean, color=color, width=0.65, yerr=[[mean - low], [high - mean]], capsize=4)
            axis.text(at, 1, f"{mean:.1f}", ha="center", fontsize=9)
        axis.set_xticks(range(len(METHODS)), METHODS)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out accuracy, %")
    figure.savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    main()
