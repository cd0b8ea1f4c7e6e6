"""How accuracy rises with the responses sampled: table and plot of docs/studies/chain.md from the records of a study.

    python -m benchmarks.course outputs/study-chain

The mean reward of the fresh groups of a step is the accuracy on prompts of the training set with the weights of that
step, at no cost; as long as no prompt was seen before, it is that on held-out ones. Methods that choose their prompts
show the accuracy on those.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

from bapo.core.text import count
from benchmarks.page_tables import replace_between
from studies.compare.gather import Compared, Measured, Method, gather

PAGE, PICTURE = Path("docs/studies/chain.md"), Path("docs/images/course.png")
BEGIN, END = "<!-- course -->", "<!-- end of course -->"
WINDOW, NUM_WINDOWS = 3840, 8
"""Responses of a window: 15 steps of 256. Eight are the budget of the study."""
DRAWN = {"bapo-reuse": "#0072B2", "grpo": "#444444", "reuse-none": "#56B4E9", "bapo": "#CC79A7", "dapo": "#E69F00"}
"""Method -> color in the plot."""


def course(run: Measured) -> Mapping[int, float]:
    """Window -> mean reward of its fresh groups, each step weighted by its responses and counted by its middle."""
    found: dict[int, list[tuple[int, float]]] = {}
    before = 0
    for row in run.metrics:
        after = run.ledger.rollouts_by_step.get(int(row["step"]), before)
        if row["reward_mean"] is not None and after > before:
            window = (before + after) // 2 // WINDOW
            found.setdefault(window, []).append((after - before, float(row["reward_mean"])))
        before = after
    return {
        window: sum(size * mean for size, mean in steps) / sum(size for size, _ in steps)
        for window, steps in found.items()
        if window < NUM_WINDOWS
    }


def means(method: Method) -> list[float]:
    """Of the windows, over seeds."""
    courses = [course(run) for run in method.runs]
    return [fmean(found[window] for found in courses) for window in range(NUM_WINDOWS)]


def markdown(compared: Compared) -> str:
    """One row per method."""
    ends = " | ".join(f"to {count(WINDOW * (window + 1))}" for window in range(NUM_WINDOWS))
    lines = [f"| method (seeds) | {ends} |", "|---" * (NUM_WINDOWS + 1) + "|"]
    for method in compared.methods:
        cells = " | ".join(f"{100 * mean:.1f}" for mean in means(method))
        lines.append(f"| {method.label} ({len(method.runs)}) | {cells} |")
    return "\n".join(lines)


def draw(compared: Compared) -> None:
    """A line per main method, and where the first prompts of groups of 4 come again."""
    figure, axis = plt.subplots(figsize=(7.2, 3.6), constrained_layout=True)
    middles = [WINDOW * (window + 0.5) / 1000 for window in range(NUM_WINDOWS)]
    for method in compared.methods:
        if method.name in DRAWN:
            heights = [100 * mean for mean in means(method)]
            axis.plot(middles, heights, marker="o", ms=3, color=DRAWN[method.name], label=method.label)
    axis.axvline(16, color="#999999", linestyle="--", linewidth=1)
    axis.annotate("groups of 4 see\nprompts again", (16.2, 17), fontsize=8, color="#666666")
    axis.set_xlabel("training responses, thousands", fontsize=8)
    axis.set_ylabel("accuracy on fresh prompts, %", fontsize=8)
    axis.legend(fontsize=8, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", help="directory of the study")
    compared = gather([parser.parse_args().study])
    table = markdown(compared)
    replace_between(PAGE, BEGIN, END, table)
    draw(compared)
    print(table)


if __name__ == "__main__":
    main()
