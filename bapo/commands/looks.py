"""Commands that look at a run or at this machine, and `scale`: watch, scale, doctor."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from bapo.addresses import fleet_url
from bapo.commands.arguments import Tokens, hand_over, load, open_run
from bapo.config.load import dump_toml, load_resolved
from bapo.errors import DeadlineError, UnavailableError
from bapo.fleet_client import FleetClient
from bapo.token_sets import token_for_run

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, for example outputs/demo-001, or latest.")]
SCALE_TIMEOUT_S = 5.0


def watch(run: Run) -> None:
    """Show the live table of a run that goes on, or the last one of a run that has ended.

    Example:  bapo watch outputs/demo-001
    """
    hand_over("watch", "--run-dir", str(open_run(run).path))


def scale(
    run: Run,
    num: Annotated[int, typer.Argument(metavar="N", help="How many workers from now on.", min=1)],
) -> None:
    """Change the number of rollout workers while a run goes on.

    Example:  bapo scale outputs/demo-001 2
              bapo scale latest 2
    """
    directory = open_run(run)
    config = load_resolved(directory.config_path)
    try:
        url, token = fleet_url(config, directory, timeout_s=0.0), token_for_run(directory.path)
        client = FleetClient(url, retry_s=SCALE_TIMEOUT_S, token=token)
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
