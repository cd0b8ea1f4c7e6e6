"""`bapo up buffer`: the buffer service and its Redis alone, for the training loop of another framework."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from bapo.commands.arguments import AUTO, free_name, hand_over, split_tokens
from bapo.config.load import dump_toml, load_config, load_resolved
from bapo.config.tree import Config, RunConfig
from bapo.errors import ConfigError
from bapo.records import RunDirectory

NOT_OURS = ["--learner.minibatch_size", "1", "--learner.num_ranks", "1"]
"""The learner is somebody else's: its sizes must not stand in the way of a small batch. Later overrides go first."""


def up_buffer(tokens: Sequence[str], run: str | None, *, dry_run: bool) -> None:
    """Start it on a new run directory, or again on one that exists. Raises: ConfigError."""
    exists = run is not None and (Path(run) / "config.toml").is_file()
    config = _kept_config(str(run), tokens) if exists else _new_config(tokens, run)
    if config.buffer.url:
        raise ConfigError(f"buffer.url = {config.buffer.url} is a service that runs already: there is nothing to start")
    if dry_run:
        typer.echo(dump_toml(config), nl=False)
        return
    path = Path(run) if run is not None else Path(config.run.root) / config.run.name
    if not exists:
        RunDirectory.create(path, dump_toml(config))
    hand_over("buffer", "--run-dir", str(path))


def _kept_config(run: str, tokens: Sequence[str]) -> Config:
    if tokens:
        raise ConfigError(
            f"{run} exists and keeps its configuration; leave out {' '.join(tokens)}, or name a new --run"
        )
    return load_resolved(RunDirectory.open(run).config_path)


def _new_config(tokens: Sequence[str], run: str | None) -> Config:
    """Of a new run, named `buffer-001`, ... unless its path, a file or an override names it."""
    files, overrides = split_tokens(tokens)
    overrides = [*NOT_OURS, *overrides]
    if run is not None:
        path = Path(run)
        return load_config(files, [*overrides, "--run.root", str(path.parent), "--run.name", path.name])
    config = load_config(files, overrides)
    if config.run.name not in (AUTO, RunConfig().name):
        return config
    return load_config(files, [*overrides, "--run.name", free_name(Path(config.run.root), "buffer")])
