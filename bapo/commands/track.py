"""`bapo track`: a run's numbers for TensorBoard or W&B."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from bapo.commands.arguments import open_run
from bapo.config.load import load_resolved
from bapo.records import RunDirectory
from bapo.trackers.base import TrackedRun, Tracker, load_tracker
from bapo.trackers.sending import Sender

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, for example outputs/demo-001, or latest.")]
LOOK_EVERY_S = 2.0


def track(
    run: Run,
    to: Annotated[str, typer.Option("--to", metavar="TRACKER", help="tensorboard or wandb.")],
    project: Annotated[str, typer.Option("--project", help="Of W&B.")] = "bapo",
) -> None:
    """Send the numbers of a run to an experiment tracker: all so far, and the next ones until the run ends.

    Reads the run directory alone: the run neither knows nor waits. Ctrl-C ends it; called again, it begins anew.

    Example:  bapo track outputs/demo-001 --to tensorboard
              bapo track outputs/demo-001 --to wandb --project reasoning
    """
    directory = open_run(run)
    config = load_resolved(directory.config_path).model_dump(mode="json")
    tracked = TrackedRun(name=directory.name, folder=directory.path / to, project=project, config=config)
    tracker = load_tracker(to, tracked)
    try:
        rows = _follow(directory, tracker)
    finally:
        tracker.close()
    typer.echo(f"{directory.path}: {rows} rows sent to {to}")


def _follow(directory: RunDirectory, tracker: Tracker) -> int:
    sender, rows = Sender(directory, tracker), 0
    try:
        while True:
            goes_on = directory.is_under_way  # asked first: what the run writes before its end is sent, too
            if new := sender.send_new():
                rows += new
                typer.echo(f"{rows} rows sent", err=True)
            if not goes_on:
                return rows
            time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        return rows
