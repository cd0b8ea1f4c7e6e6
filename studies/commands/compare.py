"""`bapo compare`, and `bapo report` for more than the page of one run: tables and figures of several runs."""

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

from bapo.cli.arguments import run_path
from bapo.cli.recorded.report import Against, Paper, Runs
from bapo.core.errors import ConfigError
from bapo.core.text import plain_lines
from bapo.runtime.progress import progress
from studies.compare.gather import Compared, gather, remarks
from studies.compare.gather import against as paired
from studies.compare.page import as_markdown, write_comparison
from studies.compare.tables import Table, all_tables, table_1

REPORT = "report"
"""Folder of a study's report, in its directory."""


def compare(
    runs: Runs,
    against: Against = None,
    paper: Paper = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: the tables, the remarks as the last.")] = False,
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
        rows = tuple((line,) for line in remarks(compared))
        tables.append(Table(key="remarks", title="Remarks", header=("remark",), rows=rows))
        typer.echo(json.dumps([asdict(table) for table in tables], indent=1))
        return
    if markdown:
        known = "".join(f"- {line}\n" for line in remarks(compared))
        typer.echo("\n".join([*filter(None, [known]), *(as_markdown(table) for table in tables)]))
        return
    _print(compared, tables)


def report(runs: list[str], out: str | None, against: list[str] | None, *, paper: bool) -> None:
    """`bapo report` of a study, of several runs, or with --paper or --out. Raises: ConfigError without a folder."""
    is_study = len(runs) == 1 and (Path(runs[0]) / "study.toml").is_file()
    if paper and out is None and not is_study:
        with progress(f"comparing {_runs(runs)}"):
            compared = paired(gather(runs), against or ())
            table = table_1(compared, paper=True)
        _print(compared, [table])
        return
    if out is None and not is_study:
        raise ConfigError("a report of several runs needs a folder: --out FOLDER")
    folder = Path(runs[0]) / REPORT if out is None else Path(out)
    with progress(f"reporting {_runs(runs)}"):
        written = write_comparison(paired(gather(runs), against or ()), folder, paper=paper)
    typer.echo(str(written))


def _print(compared: Compared, tables: Sequence[Table]) -> None:
    """Remarks first: they say what the numbers are not."""
    console = Console(highlight=False)
    for line in remarks(compared):
        console.print(Text(plain_lines(line), "yellow"))
    for table in tables:
        print_table(console, table)


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
