"""`bapo view`: the web page of a run, from its run directory alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from bapo.commands.arguments import open_run

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

    A run that goes on serves the same page itself, with what only its buffer knows: http://127.0.0.1:8700/web/.

    Example:  bapo view outputs/demo-001
              bapo view outputs/demo-001 --export demo.html
    """
    directory = open_run(run)
    if export is not None:
        from bapo.web.export import write_export

        path = write_export(directory, Path(export))
        typer.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
        return
    _hand_over("--run-dir", str(directory.path), "--port", str(port), "--host", host)


def _hand_over(*arguments: str) -> NoReturn:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "buffer_service.view", *arguments])  # noqa: S606 - no shell
