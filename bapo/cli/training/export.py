"""`bapo export`: the model of a checkpoint in Hugging Face format."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from bapo.cli.arguments import Run, open_run, say, waiting
from bapo.cli.training.hub import check_target, push_folder
from bapo.cli.training.model_card import model_card
from bapo.config.load import load_resolved
from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.core.text import percent
from bapo.runtime.progress import progress
from bapo.runtime.run_directory.best import best_first, measured, newer_weights
from bapo.runtime.run_directory.files import storing
from bapo.runtime.run_directory.layout import RunDirectory


def export(
    run: Run,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Checkpoint of the run to export; default: the latest.")
    ] = None,
    best: Annotated[
        bool,
        typer.Option(
            "--best", help="The checkpoint whose weights measured best on held-out data (checkpoint.keep_best)."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder to create; default: hf, or adapter, in the checkpoint."),
    ] = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="With LoRA: the whole model with the adapter merged, not the adapter.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option("--push-to-hub", metavar="ORG/NAME", help="Upload it to the Hugging Face Hub, with a model card."),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push-to-hub: as a private repository.")] = False,
) -> None:
    """Write the model of a checkpoint in Hugging Face format, in float32, with its tokenizer; with LoRA the adapter
    in PEFT's format, or with --merged the model in `model.dtype`.

    A run does this for its last step. The folder stays when the run deletes the checkpoint. transformers and vLLM load
    it; PEFT loads an adapter. An upload uses the token of HF_TOKEN or hf auth login, and replaces the weights of an
    earlier one.

    Examples:

      bapo export outputs/demo-001
      bapo export outputs/demo-001 --step 40 --out models/mine
      bapo export outputs/demo-001 --best
      bapo export outputs/lora-001 --merged
      bapo export outputs/demo-001 --push-to-hub ORG/NAME --private
    """
    directory = open_run(run)
    if out is not None and out.exists():
        raise ConfigError(f"{out} exists already; name a folder to create")
    if best:
        if step is not None:
            raise ConfigError("--best and --step both choose a checkpoint; remove one of them")
        step = best_step(directory)
    if private and push is None:
        raise ConfigError("--private is only for --push-to-hub ORG/NAME")
    if push is not None:
        check_target(push)
    config = load_resolved(directory.config_path)
    is_adapter = not merged and config.model.lora is not None
    step = chosen_step(directory, step)
    folder = exported(directory, step, out, adapter=is_adapter)
    say(str(folder))
    if push is not None:
        _upload(directory, config, step, folder, push, private=private, is_adapter=is_adapter)


def _upload(
    run: RunDirectory, config: Config, step: int, folder: Path, repo: str, *, private: bool, is_adapter: bool
) -> None:
    """With a README.md, unless the folder has one. Raises: as `push_folder`; RecordError, StorageError."""
    card = folder / "README.md"
    if card.exists():
        say(f"{card} is kept as it is; delete it to get a new one")
    else:
        text = model_card(repo, config, step, run.read_evaluations(whole=True), is_adapter=is_adapter)
        with storing(card):
            card.write_text(text, encoding="utf-8")
    with waiting(f"uploading {folder} to {repo}"):
        url = push_folder(folder, repo, private=private, message=f"Step {step} of {run.name}, by BAPO")
    say(url)


def best_step(run: RunDirectory) -> int:
    """Step of the checkpoint whose weights measured best. Raises: ConfigError if these have no checkpoint."""
    found = best_first(measured(run.read_evaluations(), load_resolved(run.config_path).evaluation.best_measure))
    if not found:
        raise ConfigError(f"run {run.path} has no held-out measurement, so no best weights; choose some with --step N")
    best, kept = found[0], run.checkpoint_steps()
    if best.step in kept:
        if newer := newer_weights(best):
            say(f"step {best.step}: {best.split} {percent(best.mean)}{newer}; bapo eval measures the checkpoint itself")
        return best.step
    others = next((one for one in found if one.step in kept), None)
    instead = (
        f"export the best that is kept with --step {others.step} ({percent(others.mean)})"
        if others
        else "no kept one is measured"
    )
    why = (
        f"the base model measured best ({best.split} {percent(best.mean)}): no checkpoint exceeds it"
        if best.step == 0
        else f"the weights after step {best.step} measured best ({best.split} {percent(best.mean)}), but have no "
        "checkpoint; checkpoint.keep_best = 1 keeps them in the next run"
    )
    raise ConfigError(f"{why}; {instead}")


def chosen_step(run: RunDirectory, step: int | None) -> int:
    """That step, or for None the latest checkpoint. Raises: ConfigError if there is no such checkpoint."""
    steps = run.checkpoint_steps()
    if not steps:
        raise ConfigError(f"run {run.path} has no checkpoint yet")
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise ConfigError(f"run {run.path} has no checkpoint of step {chosen}; available: {', '.join(map(str, steps))}")
    return chosen


def exported(run: RunDirectory, step: int | None, out: Path | None = None, *, adapter: bool = False) -> Path:
    """The folder with the model of a checkpoint, written if it does not exist.

    Args:
        step: None: the latest checkpoint.
        out: None: in the checkpoint.
        adapter: of a run with LoRA, its adapter instead.
    Raises: ConfigError if there is no such checkpoint.
    """
    chosen = chosen_step(run, step)
    folder = run.checkpoint_dir(chosen) / ("adapter" if adapter else "hf") if out is None else out
    if not folder.exists():
        flags = ["--config", str(run.config_path), "--run-dir", str(run.path), "--step", str(chosen)]
        flags += [] if adapter else ["--merged"]
        command = [sys.executable, "-m", "learner.export", *flags, *(["--out", str(out)] if out else [])]
        with progress(f"exporting step {chosen} of {run.name}"):
            done = subprocess.run(command, check=False)
        if done.returncode:  # it has reported the reason
            raise typer.Exit(done.returncode)
    return folder
