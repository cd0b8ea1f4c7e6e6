"""`bapo compare` and `bapo report`: tables and figures of several runs, and the page of one run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table as Shown
from rich.text import Text

from bapo.analysis.compare.gather import against as paired
from bapo.analysis.compare.gather import gather, remarks
from bapo.analysis.compare.page import as_markdown, write_comparison
from bapo.analysis.compare.tables import Table, all_tables
from bapo.cli.arguments import run_path
from bapo.cli.running.monitor import export_page
from bapo.core.errors import ConfigError
from bapo.core.text import plain_lines
from bapo.runtime.progress import progress
from bapo.runtime.run_directory.layout import RunDirectory

Runs = Annotated[
    list[str], typer.Argument(metavar="RUN...|STUDY", help="Run directories, or the directory of a study.")
]


Paper = Annotated[bool, typer.Option("--paper", help="Show the published results next to those of the runs.")]


Against = Annotated[
    list[str] | None,
    typer.Option(
        "--against",
        metavar="METHOD",
        help="Baseline method; may be repeated. Figures use the first one. "
        "Default: the first method, and DAPO for BAPO if both exist.",
    ),
]


REPORT = "report"
"""Folder of a study's report, in its directory."""


def compare(
    runs: Runs,
    against: Against = None,
    paper: Paper = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare runs: accuracy and differences with intervals, cost, newly solved prompts.

    Runs that differ only in their seed (mine-s1, mine-s2) are one method. Methods are compared with the first one, or
    with those given by --against. Runs that were evaluated differently are rejected with an explanation.

    Examples:

      bapo compare outputs/grpo-s1 outputs/bapo-s1 --paper
      bapo compare outputs/study-chain --against dapo --against bapo
    """
    runs = list(map(run_path, runs))
    with progress(f"comparing {_runs(runs)}"):
        compared = paired(gather(runs), against or ())
        tables = all_tables(compared, paper=paper)
    if as_json:
        typer.echo(json.dumps([asdict(table) for table in tables], indent=1))
        return
    if markdown:
        known = "".join(f"- {line}\n" for line in remarks(compared))
        typer.echo("\n".join([*filter(None, [known]), *(as_markdown(table) for table in tables)]))
        return
    console = Console(highlight=False)
    for line in remarks(compared):
        console.print(Text(plain_lines(line), "yellow"))
    for table in tables:
        print_table(console, table)


def report(
    runs: Runs,
    out: Annotated[str | None, typer.Option("--out", metavar="FOLDER", help="Folder to write to.")] = None,
    against: Against = None,
    paper: Paper = False,
) -> None:
    """Write the page of one run to RUN/report.html, which works offline; or figures and tables of several runs.

    With --paper and without --out: Table 1 of the paper in the terminal, from the splits that these runs measured.
    For a study, for several runs, or with --out: every figure as PNG and PDF, every table as CSV and Markdown, and
    report.md with all of them. A figure of the paper that these records cannot show is listed with the reason.

    Examples:

      bapo report outputs/demo-001
      bapo report outputs/math-1.5b --paper
      bapo report outputs/study-chain --paper --against dapo
      bapo report outputs/grpo-s1 outputs/bapo-s1 --out outputs/comparison
    """
    runs = list(map(run_path, runs))
    is_study = len(runs) == 1 and (Path(runs[0]) / "study.toml").is_file()
    if paper and out is None and not is_study:
        _print_table_1(runs)
        return
    if len(runs) == 1 and not is_study and out is None:
        if against:
            raise ConfigError("--against compares methods, but this is one run; pass several runs, or a study")
        directory = RunDirectory.open(runs[0])
        export_page(directory.path, directory.report_path)
    if out is None and not is_study:
        raise ConfigError("a report of several runs needs a folder: --out FOLDER")
    folder = Path(runs[0]) / REPORT if out is None else Path(out)
    with progress(f"reporting {_runs(runs)}"):
        written = write_comparison(paired(gather(runs), against or ()), folder, paper=paper)
    typer.echo(str(written))


def _print_table_1(runs: list[str]) -> None:
    from bapo.analysis.compare.gather import gather
    from bapo.analysis.compare.tables import table_1

    with progress(f"comparing {_runs(runs)}"):
        table = table_1(gather(runs), paper=True)
    print_table(Console(highlight=False), table)


def _runs(runs: list[str]) -> str:
    return runs[0] if len(runs) == 1 else f"{len(runs)} runs"


# Tables of text in a terminal: cells as they are written, and columns that break between words as long as they can.

GAP = 2


def print_table(console: Console, table: Table) -> None:
    shown = Shown(
        title=Text(plain_lines(table.title)),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    # Names and commits of runs come from files.
    header, *rows = [[plain_lines(cell) for cell in row] for row in (table.header, *table.rows)]
    widths = column_widths([header, *rows], console.width)
    turned = list(map(list, zip(header, *rows, strict=True)))
    if widths is None and len(turned[0]) < len(header):  # too wide: one line for each column, if they are more
        header, *rows = turned
        widths = column_widths(turned, console.width)
    for place, name in enumerate(header):
        shown.add_column(Text(name), overflow="fold", width=widths[place] if widths else None)
    for row in rows:
        # Text, not str: an interval in square brackets would be parsed as markup.
        shown.add_row(*map(Text, row))
    console.print(shown)
    console.print(Text(f"\n{plain_lines(table.note)}\n", "bright_black"))


def column_widths(rows: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Column widths that break no word and minimize the height; None if words are too wide."""
    columns = list(zip(*rows, strict=True))
    widths = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    most = [max(map(len, column)) for column in columns]
    room = width - GAP * (len(columns) - 1) - sum(widths)
    if room < 0:
        return None
    while room and (growing := [place for place in range(len(columns)) if widths[place] < most[place]]):
        widths[max(growing, key=lambda place: most[place] / widths[place])] += 1
        room -= 1
    return widths
