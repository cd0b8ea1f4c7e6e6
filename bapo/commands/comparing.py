"""`bapo compare` and `bapo report`: runs beside each other as tables and figures, and the page of one run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from bapo.commands.arguments import run_path
from bapo.commands.view import export_page
from bapo.errors import ConfigError
from bapo.plain_text import plain_lines
from bapo.records import RunDirectory

Runs = Annotated[
    list[str], typer.Argument(metavar="RUN...|STUDY", help="Run directories, or the directory of a study.")
]


Paper = Annotated[bool, typer.Option("--paper", help="Show the published numbers beside ours.")]


Against = Annotated[
    list[str] | None,
    typer.Option(
        "--against",
        metavar="METHOD",
        help="Compare all methods with this one instead of the first; may be repeated. Tables and figures with one "
        "reference take the first. Without it, BAPO is also compared with DAPO where both are there.",
    ),
]


REPORT = "report"
"""Where a study's report goes, below its directory."""


def compare(
    runs: Runs,
    against: Against = None,
    paper: Paper = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Put runs beside each other: accuracy with intervals, cost, paired tests, rescued prompts.

    Runs that differ in their seed alone (mine-s1, mine-s2) are one method; the first method is what the others are
    compared with, or those named by --against. Runs that were measured differently are refused, with the difference.

    Example:  bapo compare outputs/grpo-s1 outputs/bapo-s1 --paper
              bapo compare outputs/study-countdown
              bapo compare outputs/study-countdown --against dapo --against bapo
    """
    runs = list(map(run_path, runs))
    from bapo.commands.terminal_tables import print_table
    from bapo.comparison import contrasts
    from bapo.comparison.gather import gather
    from bapo.comparison.page import as_markdown
    from bapo.comparison.remarks import remarks
    from bapo.comparison.tables import all_tables

    compared = contrasts.against(gather(runs), against or ())
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
    out: Annotated[str | None, typer.Option("--out", metavar="FOLDER", help="Where the report goes.")] = None,
    against: Against = None,
    paper: Paper = False,
) -> None:
    """Write the dashboard of one run into RUN/report.html, which opens offline; or the paper's figures and tables.

    Of a study, of several runs, or with --out: every figure as PNG and PDF, every table as CSV and Markdown, and
    report.md with all of them. A figure of the paper that these records do not hold is named with the reason.

    Example:  bapo report outputs/demo-001
              bapo report outputs/study-countdown --paper --against dapo
              bapo report outputs/grpo-s1 outputs/bapo-s1 --out outputs/comparison
    """
    runs = list(map(run_path, runs))
    is_study = len(runs) == 1 and (Path(runs[0]) / "study.toml").is_file()
    if len(runs) == 1 and not is_study and out is None:
        if against:
            raise ConfigError("--against compares methods, and this is one run; name several runs, or a study")
        directory = RunDirectory.open(runs[0])
        export_page(directory, directory.report_path)
    if out is None and not is_study:
        raise ConfigError("several runs have no folder in common; name one for their report with --out FOLDER")
    from bapo.comparison import contrasts
    from bapo.comparison.gather import gather
    from bapo.comparison.page import write_comparison

    folder = Path(runs[0]) / REPORT if out is None else Path(out)
    compared = contrasts.against(gather(runs), against or ())
    typer.echo(str(write_comparison(compared, folder, paper=paper)))
