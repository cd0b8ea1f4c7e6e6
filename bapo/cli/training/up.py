"""`bapo up` and `bapo create`: start the services of a run without its learner, or only create its directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bapo.cli.arguments import AUTO, FreePorts, Tokens, free_name, hand_over, load_named, run_path, split_tokens
from bapo.cli.training.start import DryRun, create_run, dry_run_of, layers_of, refuse_unnamed, warn_of_unused
from bapo.config.load import diff, dump_toml, load_config, load_resolved
from bapo.config.tree import Config, RunConfig
from bapo.core.errors import ConfigError
from bapo.runtime import build_info
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.tasks.registry import task_of

BUFFER_ALONE = "buffer"


def up(
    config: Tokens = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="For up buffer: run directory to create or reopen.")
    ] = None,
    dry_run: DryRun = False,
    free_ports: FreePorts = False,
) -> None:
    """Start the services of a run without its learner.

    These are Redis, buffer service, workers, scheduler, evaluator and web page. With buffer as the first argument: only
    Redis and the buffer service, for the training loop of another framework.

    Examples:

      bapo up deploy/configs/demo.toml --run.name services
      bapo up buffer --run outputs/mine --algorithm.batch_size 32
    """
    run = run_path(run) if run else None
    if config and config[0] == BUFFER_ALONE:
        up_buffer([*(["--buffer.port=0"] if free_ports else []), *config[1:]], run, dry_run=dry_run)
        return
    if run is not None:
        raise ConfigError(f"--run is only for `bapo up buffer`; otherwise use --run.name {Path(run).name}")
    resolved = load_named(config, free_ports=free_ports)
    refuse_unnamed(config or [])
    if dry_run:
        dry_run_of(resolved, "up")
    created = create_run(resolved)
    typer.echo(f"run directory {created.path}")
    hand_over("up", "--run-dir", str(created.path))


def create(config: Tokens = None) -> None:
    """Create a run directory without starting anything.

    An existing run directory keeps its config. Used by the Compose and Kubernetes deployments.

    Examples:

      bapo create deploy/configs/demo.toml --run.root /bapo/outputs
    """
    resolved = load_named(config)
    path = Path(resolved.run.root) / resolved.run.name
    if (path / "config.toml").is_file():
        typer.echo(f"run directory {path} exists, keeping its config")
        if changed := diff(load_resolved(path / "config.toml"), resolved):
            typer.echo("not taken, as it needs a new run (--run.name):\n  " + "\n  ".join(changed), err=True)
        return
    refuse_unnamed(config or [])
    if resolved.sft is not None:
        raise ConfigError(f"[sft] is for supervised fine-tuning: bapo sft {resolved.sft.data}")
    warn_of_unused(resolved, layers_of(config or []))
    # Here, and not in each container again and again: a run keeps its config.
    task_of(resolved)
    run = create_run(resolved)
    run.update_run(commit=build_info.commit())  # there is no launcher: the processes of this run are started separately
    typer.echo(f"run directory {run.path}")
    if to := resolved.tracking.to:
        commands = "".join(f"\n  bapo track {run.path} --to {name}" for name in to)
        typer.echo(f"tracking.to: Docker Compose and Kubernetes send to no tracker. This does:{commands}", err=True)


EXTERNAL_LEARNER = ["--learner.minibatch_size", "1", "--learner.num_ranks", "1"]
"""The learner is external: its sizes must not reject a small batch. Later overrides take precedence."""


def up_buffer(tokens: Sequence[str], run: str | None, *, dry_run: bool) -> None:
    """Start the buffer on a new or existing run directory. Raises: ConfigError."""
    exists = run is not None and (Path(run) / "config.toml").is_file()
    config = _kept_config(str(run), tokens) if exists else _new_config(tokens, run)
    if config.buffer.url:
        raise ConfigError(f"buffer.url = {config.buffer.url} is a running service: there is nothing to start")
    if dry_run:
        typer.echo(dump_toml(config), nl=False)
        return
    path = Path(run) if run is not None else Path(config.run.root) / config.run.name
    if not exists:
        RunDirectory.create(path, dump_toml(config))
    hand_over("buffer", "--run-dir", str(path))


def _kept_config(run: str, tokens: Sequence[str]) -> Config:
    if tokens:
        raise ConfigError(f"{run} exists and keeps its config; remove {' '.join(tokens)}, or choose a new --run")
    return load_resolved(RunDirectory.open(run).config_path)


def _new_config(tokens: Sequence[str], run: str | None) -> Config:
    """Config of a new run, named `buffer-001`, ... unless its path, a file or an override sets the name."""
    files, overrides = split_tokens(tokens)
    overrides = [*EXTERNAL_LEARNER, *overrides]
    if run is not None:
        path = Path(run)
        return load_config(files, [*overrides, "--run.root", str(path.parent), "--run.name", path.name])
    config = load_config(files, overrides)
    if config.run.name not in (AUTO, RunConfig().name):
        return config
    return load_config(files, [*overrides, "--run.name", free_name(Path(config.run.root), "buffer")])
