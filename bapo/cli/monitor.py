"""Commands for a run or this machine: watch, scale, doctor, view, track."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from bapo.analysis.trackers.sender import send_run
from bapo.cli.arguments import Tokens, hand_over, load, open_run
from bapo.config.load import dump_toml, load_resolved
from bapo.config.tracking import TrackingConfig
from bapo.core.errors import DeadlineError, UnavailableError
from bapo.runtime.auth.token_store import token_for_run
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.endpoints import rollout_url
from bapo.transport.rollout_client import RolloutClient

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, for example outputs/demo-001, or latest.")]
SCALE_TIMEOUT_S = 5.0


def watch(run: Run) -> None:
    """Show the live table of a running run, or the last one of a run that has ended.

    Example:  bapo watch outputs/demo-001
    """
    hand_over("watch", "--run-dir", str(open_run(run).path))


def scale(
    run: Run, num: Annotated[int, typer.Argument(metavar="N", help="How many workers from now on.", min=1)]
) -> None:
    """Change the number of rollout workers of a live run.

    Example:  bapo scale outputs/demo-001 2
              bapo scale latest 2
    """
    directory = open_run(run)
    config = load_resolved(directory.config_path)
    try:
        url, token = rollout_url(config, directory, timeout_s=0.0), token_for_run(directory.path)
        client = RolloutClient(url, retry_s=SCALE_TIMEOUT_S, token=token)
        client.scale(num)
        workers = client.workers()
    except (DeadlineError, UnavailableError) as error:
        raise UnavailableError(f"run {directory.path} does not answer, so it cannot be scaled: {error}") from error
    typer.echo(f"{directory.path} will have {num} rollout workers")
    for worker in workers:
        typer.echo(f"{worker.worker_id}: {worker.state}, version {worker.policy_version}")


def doctor(
    config: Tokens = None, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False
) -> None:
    """Check what would stop a run on this machine: versions, GPUs, ports, memory, disk, Redis, data, reward,
    model.

    Example:  bapo doctor deploy/configs/demo.toml
    """
    resolved = load(config)
    with tempfile.TemporaryDirectory(prefix="bapo-doctor-") as folder:
        path = Path(folder) / "config.toml"
        path.write_text(dump_toml(resolved))
        flags = ["--config", str(path), *(["--json"] if as_json else [])]
        checked = subprocess.run([sys.executable, "-m", "services.launcher", "doctor", *flags], check=False)
    raise typer.Exit(checked.returncode)


# `bapo view`: the web page of a run, from its run directory.


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


# `bapo track`: a run's numbers for an experiment tracker.


def track(
    run: Run,
    to: Annotated[str, typer.Option("--to", metavar="TRACKER", help="mlflow, tensorboard, trackio or wandb.")],
    project: Annotated[
        str | None, typer.Option("--project", help="Instead of tracking.project. A new project gets all steps.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Send nothing over the network.")] = False,
) -> None:
    """Send the numbers of a run to an experiment tracker: all steps so far, and new ones until the run ends.

    Only needed for a run that has no [tracking] in its configuration. Called again, it sends what is new.

    Example:  bapo track outputs/demo-001 --to tensorboard
              bapo track outputs/demo-001 --to wandb --project reasoning
    """
    directory = open_run(run)
    config = load_resolved(directory.config_path)
    changes = {"offline": offline or config.tracking.offline, "project": project or config.tracking.project}
    settings = TrackingConfig.model_validate(config.tracking.model_dump() | changes)
    rows = 0
    try:
        for sent in send_run(directory, to, settings, config.model_dump(mode="json"), _wait):
            rows += sent
            if sent:
                typer.echo(f"{rows} rows sent", err=True)
    except KeyboardInterrupt:
        typer.echo("stopped; call it again to send the rest", err=True)
    typer.echo(f"{directory.path}: {rows} rows sent to {to}")


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False
