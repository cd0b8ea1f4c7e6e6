"""Commands that look at a run or at this machine, and `scale`: watch, scale, doctor."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from bapo.addresses import fleet_url
from bapo.commands.arguments import Tokens, hand_over, load, newest_run
from bapo.config.load import dump_toml, load_resolved
from bapo.errors import ConfigError, DeadlineError, UnavailableError
from bapo.fleet_client import FleetClient
from bapo.records import RunDirectory
from bapo.token_sets import token_for_run

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, for example outputs/demo-001.")]
SCALE_TIMEOUT_S = 5.0


def watch(run: Run) -> None:
    """Show the live table of a run that goes on, or the last one of a run that has ended.

    Example:  bapo watch outputs/demo-001
    """
    hand_over("watch", "--run-dir", str(RunDirectory.open(run).path))


def scale(
    what: Annotated[str, typer.Argument(metavar="rollout", help="What to scale: rollout.")],
    num: Annotated[int, typer.Argument(metavar="N", help="How many workers from now on.", min=1)],
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Default: the newest run.")] = None,
) -> None:
    """Change the number of rollout workers while a run goes on.

    Example:  bapo scale rollout 2 --run outputs/demo-001
    """
    if what != "rollout":
        raise ConfigError(f"only rollout workers can be scaled; write: bapo scale rollout {num}")
    directory = RunDirectory.open(run) if run else newest_run()
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
