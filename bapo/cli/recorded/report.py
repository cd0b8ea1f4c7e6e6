"""`bapo report`: the page of one run; of several runs or a study, what the package `studies` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bapo.cli.arguments import run_path
from bapo.cli.elsewhere import studies
from bapo.cli.running.monitor import export_page
from bapo.core.errors import ConfigError
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
    if len(runs) == 1 and not paper and out is None and not (Path(runs[0]) / "study.toml").is_file():
        if against:
            raise ConfigError("--against compares methods, but this is one run; pass several runs, or a study")
        directory = RunDirectory.open(runs[0])
        export_page(directory.path, directory.report_path)
    studies("report").report(runs, out, against, paper=paper)
