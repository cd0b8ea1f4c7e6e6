"""Table and plot of docs/which_method.md and README from the records of a study: costs and results of each method.

    python -m benchmarks.which_method outputs/study-chain --split chain --against grpo

Writes docs/images/results.png and the part of docs/which_method.md between its two marks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

from bapo.core.text import count, duration
from benchmarks.page_tables import replace_between
from studies.compare.accuracy import AtEqualResponses, at_equal_responses, base_accuracy
from studies.compare.gather import Compared, Measured, Method, code_of, gather
from studies.compare.tables import interval, points

PAGE, PICTURE = Path("docs/which_method.md"), Path("docs/images/results.png")
BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"
COLORS = {"reference": "#999999", "most": "#0072B2", "fewer": "#56B4E9"}


@dataclass(frozen=True, kw_only=True)
class Row:
    method: Method
    at_budget: AtEqualResponses | str
    """Against the reference, at equal responses."""
    cold: AtEqualResponses | str
    """The same at the additional temperature."""


def rows_of(compared: Compared, split: str, reference: str) -> list[Row]:
    """One per method, in the order of the study."""
    other = next(method for method in compared.methods if method.name == reference)
    cold = next((name for name in compared.splits if name.startswith(f"{split}@")), "")
    return [
        Row(
            method=method,
            at_budget=at_equal_responses(method, other, split),
            cold=at_equal_responses(method, other, cold) if cold else "not measured",
        )
        for method in compared.methods
    ]


def markdown(compared: Compared, rows: list[Row], split: str, reference: str) -> str:
    """The table, the base model first."""
    runs = [run for method in compared.methods for run in method.runs]
    cold = next((name for name in compared.splits if name.startswith(f"{split}@")), "")
    budget = next((count(row.at_budget.budget) for row in rows if not isinstance(row.at_budget, str)), "equal")
    label = next(row.method.label for row in rows if row.method.name == reference)
    temperature = cold.rpartition("@")[2]
    base, cold_base = (interval(base_accuracy(runs, name)) for name in (split, cold))
    newest = code_of(max((run.directory.read_run() for run in runs), key=lambda fields: float(fields["started_at"])))
    lines = [
        f"| method | seeds | at {budget} responses, T = 1 | to {label} | T = {temperature} | to {label} | "
        "responses | updates | time of all steps | of updates |",
        "|---|---|---|---|---|---|---|---|---|---|",
        f"| base model | | {base} | | {cold_base} | | | | | |",
    ]
    for row in rows:
        runs, is_reference = row.method.runs, row.method.name == reference
        cells = [
            row.method.label, str(len(runs)), *_at_budget(row.at_budget, is_reference),
            *_at_budget(row.cold, is_reference), count(fmean([run.ledger.rollouts for run in runs])),
            f"{fmean([run.num_updates for run in runs]):.0f}", *_times(runs, newest),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _times(runs: Sequence[Measured], code: str) -> tuple[str, str]:
    """Of all steps, waits included, and of their updates with pi_prox: medians over the runs of this code. A study may
    take several days, on machines of different speed."""
    timed = [run for run in runs if code_of(run.directory.read_run()) == code]
    if not timed:
        return "-", "-"
    updates = [sum((row["prox_s"] or 0) + row["update_s"] for row in run.directory.read_metrics()) for run in timed]
    return duration(median(run.ledger.train_s for run in timed)), duration(median(updates))


def _at_budget(found: AtEqualResponses | str, is_reference: bool) -> tuple[str, str]:
    """Accuracy, and the difference to the reference."""
    if isinstance(found, str):
        return "-", "-"
    return f"{100 * found.method:.1f}", "" if is_reference else points(found.difference)


def draw(compared: Compared, rows: list[Row], split: str, reference: str) -> None:
    """Paired differences to the reference at equal responses with their intervals, methods sorted."""
    label = next(row.method.label for row in rows if row.method.name == reference)
    known = [(row.method, row.at_budget) for row in rows if not isinstance(row.at_budget, str)]
    known = sorted((pair for pair in known if pair[0].name != reference), key=lambda pair: pair[1].difference.mean)
    most = max(len(found.seeds) for _, found in known)
    figure, axis = plt.subplots(figsize=(7.2, 0.23 * len(known) + 0.9), constrained_layout=True)
    for place, (_, found) in enumerate(known):
        change = found.difference
        around = [[change.mean - change.low], [change.high - change.mean]]
        color = COLORS["most" if len(found.seeds) == most else "fewer"]
        axis.errorbar(100 * change.mean, place, xerr=[[100 * part[0]] for part in around], fmt="o", color=color, ms=4)
    axis.axvline(0, color=COLORS["reference"], linestyle="--", linewidth=1)
    axis.set_yticks(range(len(known)), [f"{method.label} ({len(found.seeds)})" for method, found in known], fontsize=8)
    axis.set_xlabel(
        f"accuracy on held-out {split} after {count(known[0][1].budget)} training responses: points to {label}\n"
        "95 % intervals over seeds (number in brackets) and prompts",
        fontsize=8,
    )
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", help="directory of the study")
    parser.add_argument("--split", default="chain", help="held-out split (default: %(default)s)")
    parser.add_argument("--against", default="grpo", help="method that the others are compared with")
    args = parser.parse_args()
    compared = gather([args.study])
    rows = rows_of(compared, args.split, args.against)
    table = markdown(compared, rows, args.split, args.against)
    replace_between(PAGE, BEGIN, END, table)
    draw(compared, rows, args.split, args.against)
    print(table)


if __name__ == "__main__":
    main()
