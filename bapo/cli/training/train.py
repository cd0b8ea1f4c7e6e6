"""`bapo train` and `bapo eval`: start or resume a run, and evaluate a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bapo.cli.arguments import (
    FreePorts,
    Quiet,
    Tokens,
    Verbose,
    complete_run,
    free_name,
    hand_over,
    load_named,
    open_run,
    run_path,
    say,
    split_tokens,
)
from bapo.cli.training.export import exported
from bapo.cli.training.start import (
    DEMO,
    DryRun,
    create_run,
    dry_run_of,
    layers_of,
    refuse_empty,
    refuse_unnamed,
    warn_of_unused,
)
from bapo.config.load import load_config, load_resolved
from bapo.config.tree import Config, TaskConfig
from bapo.core.errors import ConfigError
from bapo.runtime.model_files import is_hub_id, missing_parts
from bapo.runtime.peft_config import ADAPTER_CONFIG
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.rows import ended_early

AS_EXPORTED = ("--model.lora", "null", "--model.adapter", "null", "--sft", "null")
"""The model of a run is whole, and is not trained any more."""


def train(
    config: Tokens = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Resume this run from its latest checkpoint.",
            autocompletion=complete_run,
        ),
    ] = None,
    dry_run: DryRun = False,
    free_ports: FreePorts = False,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="With --resume: resume although data, reward, model or config changed."),
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train a model: start all processes on this machine, show progress, print a summary at the end.

    Stop the run with Ctrl-C, or with bapo stop RUN from another terminal; it can be resumed.

    Examples:

      bapo train run.toml
      bapo train run.toml --dry-run
      bapo train deploy/configs/demo.toml --run.name mine --learner.lr 5e-5
      bapo train --resume outputs/mine
    """
    flags = [*(["--quiet"] if quiet else []), *(["--verbose"] if verbose else [])]
    if resume is not None:
        if dry_run:
            raise ConfigError(
                f"--dry-run checks a new run, and would start nothing of {resume}; see where it stands with: bapo "
                f"status {resume}"
            )
        flags += [*(["--accept-changes"] if accept_changes else []), *(["--free-ports"] if free_ports else [])]
        _resume(resume, config, flags)
    if accept_changes:
        raise ConfigError("--accept-changes is only for --resume RUN")
    refuse_empty(config)
    resolved = load_named(config, free_ports=free_ports)
    refuse_unnamed(config or [])
    if resolved.sft is not None:
        raise ConfigError(f"[sft] is for supervised fine-tuning: bapo sft {resolved.sft.data}")
    if not quiet:
        warn_of_unused(resolved, layers_of(config or []))
    if dry_run:
        dry_run_of(resolved, "train")
    run = create_run(resolved)
    if not quiet:
        say(describe(resolved, run))
    hand_over("train", "--run-dir", str(run.path), *flags)


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL", help="A run directory, or a model in Hugging Face format.", autocompletion=complete_run
        ),
    ],
    config: Tokens = None,
    step: Annotated[
        int | None, typer.Option("--step", help="Checkpoint of the run to evaluate; default: the latest.")
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Evaluate a checkpoint of a run, or a model, on held-out data.

    Examples:

      bapo eval outputs/demo-001 --evaluation.num_prompts_final 200
      bapo eval outputs/demo-001 --evaluation.top_k 1 --evaluation.temperatures [] --evaluation.num_samples 1
      bapo eval models/countdown-tiny deploy/configs/demo.toml
    """
    files, overrides = split_tokens(config or [])
    target = run_path(target)
    if (Path(target) / "config.toml").is_file():
        if files:
            raise ConfigError(f"{target} is a run and has its own config; remove {', '.join(files)}")
        run = RunDirectory.open(target)
        _refuse_unnamed_task(run, overrides)
        model, files = str(exported(run, step)), [str(run.config_path)]
        overrides = [*overrides, *AS_EXPORTED]
    elif step is not None:
        raise ConfigError(f"--step requires a run, but {target} is not a run directory")
    elif not Path(target).is_dir() and (not is_hub_id(target) or Path(target).parts[0] == "outputs"):
        raise ConfigError(f"{target} is neither a run directory, nor a model folder, nor a Hugging Face id")
    elif (Path(target) / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"{target} is an adapter, not a model: evaluate its run (bapo eval RUN), its export by bapo export RUN "
            "--merged, or the model that merge_and_unload of PEFT gives"
        )
    elif Path(target).is_dir() and (missing := missing_parts(Path(target))):
        raise ConfigError(f"{target} is neither a run directory nor a model: it has no {' and no '.join(missing)}")
    else:
        model = target
    resolved = load_config(files, overrides)
    if resolved.model.adapter is not None:
        raise ConfigError(
            f"bapo eval measures {target} as it is, without model.adapter; merge {resolved.model.adapter} into it "
            "(merge_and_unload and save_pretrained of PEFT) and evaluate that folder"
        )
    refuse_unnamed([*files, *overrides, "--model.path", model], f"bapo eval {target} {DEMO}")
    name = free_name(Path(resolved.run.root), f"{Path(target).resolve().name[:50]}-eval")
    measured = create_run(load_config(files, [*overrides, "--model.path", model, "--run.name", name]))
    if not quiet:
        say(f"evaluating {model}; results: {measured.path}/evaluations.jsonl")
    flags = [*(["--quiet"] if quiet else []), *(["--verbose"] if verbose else [])]
    hand_over("evaluate", "--run-dir", str(measured.path), *flags)


def _refuse_unnamed_task(run: RunDirectory, overrides: Sequence[str]) -> None:
    """Reject to measure a fine-tuned model on the default task, which its config has without a file that sets one.

    Raises: ConfigError.
    """
    config = load_resolved(run.config_path)
    if config.sft is None or config.task != TaskConfig() or any(each.startswith("--task.") for each in overrides):
        return
    raise ConfigError(
        f"{run.path} is supervised fine-tuning and names no task to measure it on: add --task.name and --task.options, "
        f"or export it and evaluate the folder: bapo export {run.path}, bapo eval FOLDER run.toml"
    )


LONG_EPISODES = {
    "drop": "; a group with an episode that spans more of them is dropped and sampled again (rollout.stale_tokens)",
    "mask": "; of an episode that spans more of them the older tokens do not train (rollout.stale_tokens)",
}
"""What happens to episodes that take longer than that."""


def describe(config: Config, run: RunDirectory) -> str:
    """Summary of the run to start: sizes per step, updates and staleness."""
    algorithm, learner, cadence = config.algorithm, config.learner, config.cadence
    num_updates = -(-algorithm.batch_size // config.groups_per_update) * learner.epochs
    return (
        f"run directory {run.path}\n"
        f"{config.method} on {config.task.name} with {config.model.path}: {config.run.num_steps} steps; "
        f"{algorithm.batch_size} prompts x {algorithm.group_size} = {algorithm.batch_size * algorithm.group_size} "
        f"fresh responses per step; minibatches of {config.groups_per_update} groups, up to {num_updates} updates per "
        f"step; new weights every {cadence.weight_sync_interval} steps, fresh groups up to {cadence.max_staleness} "
        "steps stale"
    ) + ("" if config.agents is None else LONG_EPISODES[config.rollout.stale_tokens])


def _resume(path: str, tokens: list[str] | None, flags: list[str]) -> None:
    """Exec the launcher to resume a run. Raises: ConfigError."""
    if tokens:
        raise ConfigError(
            f"--resume continues {path} with its own config; remove {' '.join(tokens)} "
            "(a different config needs a new run)"
        )
    run = open_run(path)
    resolved = load_resolved(run.config_path)
    if resolved.sft is not None:
        raise ConfigError(f"run {run.path} is supervised fine-tuning: bapo sft --resume {run.path}")
    if not run.is_of_training:
        raise ConfigError(f"run {run.path} does not train. {run.how_to_resume}")
    if run.read_run().get("status") == "finished":
        num_steps, ended = resolved.run.num_steps, ended_early(run.read_metrics())
        why = f"it ended early: {ended}" if ended else f"all {num_steps} steps are trained"
        raise ConfigError(f"run {run.path} is finished: {why}; start a new run")
    if "--quiet" not in flags:
        say(f"resuming {run.path} {run.resume_point}")
    hand_over("train", "--run-dir", str(run.path), "--resume", *flags)
