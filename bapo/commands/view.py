"""`bapo view`: the web page of a run, from its run directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from bapo.commands.arguments import open_run
from bapo.records import RunDirectory

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, for example outputs/demo-001, or latest.")]


def view(
    run: Run,
    export: Annotated[
        str | None, typer.Option("--export", metavar="FILE", help="Write the page into one file that opens offline.")
    ] = None,
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.")] = 8709,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Show the web page of a run, finished or not, without Redis; or write it into one file.

    A run in progress serves the same page itself: `bapo train` prints its address.

    Example:  bapo view outputs/demo-001
              bapo view outputs/demo-001 --export demo.html
    """
    directory = open_run(run)
    if export is not None:
        export_page(directory, export)
    arguments = _command(directory, "--port", str(port), "--host", host)
    sys.stdout.flush()
    os.execv(arguments[0], arguments)  # noqa: S606 - no shell; Ctrl-C and exit code are then the dashboard's own


def export_page(run: RunDirectory, file: str | Path) -> NoReturn:
    """Write the page of a run into one file, and end as that ends."""
    raise typer.Exit(subprocess.run(_command(run, "--export", str(file)), check=False).returncode)


def _command(run: RunDirectory, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "services.dashboard.view", str(run.path), *arguments]
