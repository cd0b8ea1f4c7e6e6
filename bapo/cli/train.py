"""Commands that start something: train, up, create, eval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bapo.cli.arguments import AUTO, Tokens, free_name, hand_over, load_named, open_run, run_path, say, split_tokens
from bapo.config.load import dump_toml, load_config, load_resolved
from bapo.config.tree import Config, RunConfig
from bapo.core.errors import ConfigError
from bapo.runtime import build_info
from bapo.runtime.run_directory.layout import RunDirectory

ALONE = "buffer"
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")]


def train(
    config: Tokens = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Continue this run from its newest checkpoint.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Post-train a model: start everything on this machine, show it live, end with a summary and a report.

    Example:  bapo train deploy/configs/demo.toml --run.name mine --learner.lr 5e-5
    """
    if resume is not None:
        _resume(resume, config)
    resolved = load_named(config)
    if dry_run:
        typer.echo(dump_toml(resolved), nl=False)
        return
    if not config:
        raise ConfigError("which configuration? For example: bapo train deploy/configs/demo.toml, or --resume RUN")
    run = _create(resolved)
    say(describe(resolved, run))
    hand_over("train", "--run-dir", str(run.path))


def up(
    config: Tokens = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="`up buffer`: run directory to create or resume.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Start the services of a run without its learner: Redis, buffer service, workers, scheduler, evaluator.

    With the word `buffer` in front: Redis and the buffer service alone, for a training loop of your own.

    Example:  bapo up deploy/configs/demo.toml --run.name services
              bapo up buffer --run outputs/mine --algorithm.batch_size 32
    """
    run = run_path(run) if run else None
    if config and config[0] == ALONE:
        up_buffer(config[1:], run, dry_run=dry_run)
        return
    if run is not None:
        raise ConfigError(f"--run belongs to `bapo up buffer`; name other runs with --run.name {Path(run).name}")
    resolved = load_named(config)
    if dry_run:
        typer.echo(dump_toml(resolved), nl=False)
        return
    made = _create(resolved)
    typer.echo(f"run directory {made.path}")
    hand_over("up", "--run-dir", str(made.path))


def create(config: Tokens = None) -> None:
    """Make a run directory and stop; a run that exists is left as it is. Compose and Kubernetes start with this.

    Example:  bapo create deploy/configs/demo.toml --run.name demo --run.root /bapo/outputs
    """
    resolved = load_named(config)
    path = Path(resolved.run.root) / resolved.run.name
    if (path / "config.toml").is_file():
        typer.echo(f"run directory {path} exists and keeps its configuration")
        return
    run = _create(resolved)
    run.update_run(commit=build_info.commit())  # no launcher will: the parts of this run are started by something else
    typer.echo(f"run directory {run.path}")


def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run directory, or a model in HF format.")],
    config: Tokens = None,
    step: Annotated[int | None, typer.Option("--step", help="RUN: checkpoint to measure; default the newest.")] = None,
) -> None:
    """Measure held-out accuracy of a run's checkpoint or of a model, with the real engine.

    Example:  bapo eval outputs/demo-001 --evaluation.num_prompts_final 200
              bapo eval models/countdown-tiny deploy/configs/demo.toml
    """
    files, overrides = split_tokens(config or [])
    target = run_path(target)
    is_run = (Path(target) / "config.toml").is_file()
    if is_run:
        if files:
            raise ConfigError(f"{target} is a run and has its configuration; leave out {', '.join(files)}")
        run = RunDirectory.open(target)
        model, files = _checkpoint(run, step), [str(run.config_path)]
    elif step is not None:
        raise ConfigError(f"--step names a checkpoint of a run, and {target} is not a run directory")
    else:
        model = target
    root = Path(load_config(files, overrides).run.root)
    name = free_name(root, f"{Path(target).resolve().name[:50]}-eval")
    measured = _create(load_config(files, [*overrides, "--model.path", model, "--run.name", name]))
    typer.echo(f"measuring {model}; rows go to {measured.path}/evaluations.jsonl")
    hand_over("evaluate", "--run-dir", str(measured.path))


def describe(config: Config, run: RunDirectory) -> str:
    """What is about to happen, with the sums that people get wrong."""
    algorithm, learner, cadence = config.algorithm, config.learner, config.cadence
    num_updates = -(-algorithm.batch_size // learner.minibatch_size) * learner.epochs
    return (
        f"run directory {run.path}\n"
        f"{algorithm.name} on {config.task.name} with {config.model.path}: {config.run.num_steps} steps; "
        f"{algorithm.batch_size} groups x {algorithm.group_size} = {algorithm.batch_size * algorithm.group_size} "
        f"fresh responses per step; mini-batches of {learner.minibatch_size} groups -> at most {num_updates} updates; "
        f"new weights every {cadence.weight_sync_interval} steps, staleness at most {cadence.max_staleness}"
    )


def _resume(path: str, tokens: list[str] | None) -> None:
    """Hand a run that exists to the launcher. Raises: ConfigError."""
    if tokens:
        raise ConfigError(
            f"--resume continues {path} with its own configuration; leave out {' '.join(tokens)} "
            "(another configuration is another run)"
        )
    run = open_run(path)
    num_steps = load_resolved(run.config_path).run.num_steps
    step = run.latest_checkpoint()
    finished = run.read_run().get("status") == "finished"
    if finished:
        raise ConfigError(f"run {run.path} is finished: all {num_steps} steps are trained; start a new run")
    typer.echo(f"continuing {run.path} " + (f"after step {step}" if step else "from step 1: it has no checkpoint yet"))
    hand_over("train", "--run-dir", str(run.path), "--resume")


def _create(config: Config) -> RunDirectory:
    return RunDirectory.create(Path(config.run.root) / config.run.name, dump_toml(config))


def _checkpoint(run: RunDirectory, step: int | None) -> str:
    steps = run.checkpoint_steps()
    if not steps:
        raise ConfigError(f"run {run.path} has no checkpoint yet; name a model instead")
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise ConfigError(f"run {run.path} has no checkpoint of step {chosen}; it has {', '.join(map(str, steps))}")
    return str(run.checkpoint_dir(chosen) / "hf")


# `bapo up buffer`: the buffer service and its Redis alone, for the training loop of another framework.

NOT_OURS = ["--learner.minibatch_size", "1", "--learner.num_ranks", "1"]
"""The learner is external: its sizes must not stand in the way of a small batch. Later overrides go first."""


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
