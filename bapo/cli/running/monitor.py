"""Commands for a run or this machine: watch, scale, doctor, view, track."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from bapo.cli.arguments import Run, RunOrLatest, Tokens, Yes, confirm, hand_over, load, open_run, started_line
from bapo.cli.training.start import launch
from bapo.config.load import load_resolved
from bapo.core.errors import ConfigError, DeadlineError, UnavailableError
from bapo.core.text import plain
from bapo.runtime.auth.token_store import token_for_run
from bapo.transport.endpoints import rollout_url
from bapo.transport.rollout_client import RolloutClient

SCALE_TIMEOUT_S = 5.0


def watch(run: RunOrLatest = "latest") -> None:
    """Show the live table of a run until it ends or Ctrl-C; for a finished run, its last table.

    Without a terminal: one line per step, process and evaluation. Does not affect the run.

    Examples:

      bapo watch outputs/demo-001
    """
    directory = open_run(run)
    if load_resolved(directory.config_path).sft is not None:
        raise ConfigError(
            f"run {directory.path} is supervised fine-tuning: bapo sft prints a line per step; bapo status "
            f"{directory.path}"
        )
    hand_over("watch", "--run-dir", str(directory.path))


def scale(
    run: Run,
    num: Annotated[int, typer.Argument(metavar="N", help="Number of workers.", min=1)],
    yes: Yes = False,
) -> None:
    """Change the number of rollout workers of a running run.

    Examples:

      bapo scale outputs/demo-001 2
      bapo scale latest 2 --yes
    """
    directory = open_run(run)
    config = load_resolved(directory.config_path)
    typer.echo(plain(started_line(directory)), err=True)
    try:
        url, token = rollout_url(config, directory, timeout_s=0.0), token_for_run(directory.path)
        client = RolloutClient(url, retry_s=SCALE_TIMEOUT_S, token=token)
        confirm(f"change the number of workers from {len(client.workers())} to {num}?", yes=yes)
        client.scale(num)
        workers = client.workers()
    except (DeadlineError, UnavailableError) as error:
        raise UnavailableError(f"cannot scale run {directory.path}: it does not respond: {error}") from error
    typer.echo(f"{directory.path}: target is {num} rollout worker{'s' if num > 1 else ''}")
    for worker in workers:
        typer.echo(f"{worker.worker_id}: {worker.state}, version {worker.policy_version}")


def doctor(
    config: Tokens = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and failures.")] = False,
    part: Annotated[
        Literal["all", "learner", "workers"], typer.Option(help="Check only what the container of this part needs.")
    ] = "all",
) -> None:
    """Check this machine for a run: software, GPUs, ports, memory, disk, Redis, data, reward, model.

    Takes up to a minute; bapo train CONFIG --dry-run checks the config in seconds.

    Examples:

      bapo doctor run.toml
      bapo doctor deploy/configs/demo.toml --json
      bapo doctor run.toml --part learner
    """
    flags = [*(["--json"] if as_json else []), *(["--quiet"] if quiet else []), "--part", part]
    launch("doctor", load(config), *flags)


# `bapo view`: the web page of a run, from its run directory.


def view(
    run: RunOrLatest = "latest",
    export: Annotated[
        str | None, typer.Option("--export", metavar="FILE", help="Write the page to one file that works offline.")
    ] = None,
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0: a free port.")] = 8709,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Serve the web page of a run, or of a folder of runs, from the records; or write it to one file.

    The page can switch to and compare with the other runs of the folder.

    A running run serves the same page itself; its URL is printed by bapo train and bapo status.

    Examples:

      bapo view outputs/demo-001
      bapo view outputs
      bapo view outputs/demo-001 --export demo.html
    """
    is_folder = not (Path(run) / "config.toml").is_file() and any(Path(run).glob("*/config.toml"))
    path = Path(run) if is_folder and export is None else open_run(run).path
    if export is not None:
        export_page(path, export)
    _become(_command(path, "--port", str(port), "--host", host))


def export_page(run: Path, file: str | Path) -> NoReturn:
    """Write the page of a run to one file; exits with its exit code."""
    raise typer.Exit(subprocess.run(_command(run, "--export", str(file)), check=False).returncode)


def _command(run: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "services.dashboard.view", str(run), *arguments]


# `bapo track`: a run's metrics for an experiment tracker.


def track(
    run: Run,
    to: Annotated[str, typer.Option("--to", metavar="TRACKER", help="mlflow, tensorboard, trackio or wandb.")],
    project: Annotated[
        str | None, typer.Option("--project", help="Overrides tracking.project. A new project gets all steps.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Send nothing over the network.")] = False,
) -> None:
    """Send the metrics of a run to an experiment tracker: all steps so far, and new ones until the run ends.

    For a run without [tracking] in its config, and for one in Docker Compose or on Kubernetes, which start no tracker.
    Repeated calls send only new steps.

    Examples:

      bapo track outputs/demo-001 --to tensorboard
      bapo track outputs/demo-001 --to wandb --project reasoning
    """
    flags = [*(["--project", project] if project else []), *(["--offline"] if offline else [])]
    _become([sys.executable, "-m", "services.trackers.follow", str(open_run(run).path), "--to", to, *flags])


def _become(arguments: list[str]) -> NoReturn:
    """Run another program in this process: Ctrl-C and exit code are then its own."""
    sys.stdout.flush()
    os.execv(arguments[0], arguments)  # noqa: S606 - no shell
