"""`bapo view`: the web page of a run, from its run directory."""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from bapo.records import RunDirectory

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, for example outputs/demo-001.")]


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
    directory = RunDirectory.open(run)
    if export is not None:
        show_page(directory, "--export", export)
    show_page(directory, "--port", str(port), "--host", host)


def show_page(run: RunDirectory, *arguments: str) -> NoReturn:
    """Become the dashboard's view of a run: Ctrl-C and exit code are then its own."""
    sys.stdout.flush()
    command = [sys.executable, "-m", "services.dashboard.view", str(run.path), *arguments]
    os.execv(sys.executable, command)  # noqa: S606 - no shell
