"""`bapo export`: the model of a checkpoint in Hugging Face format."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from bapo.cli.arguments import Run, open_run, say
from bapo.config.load import load_resolved
from bapo.core.errors import ConfigError
from bapo.core.text import percent
from bapo.runtime.progress import progress
from bapo.runtime.run_directory.best import best_first, measured
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
) -> None:
    """Write the model of a checkpoint in Hugging Face format, in float32, with its tokenizer; with LoRA the adapter
    in PEFT's format, or with --merged the model in `model.dtype`.

    A run does this for its last step. transformers and vLLM load the folder; PEFT loads an adapter.

    Examples:

      bapo export outputs/demo-001
      bapo export outputs/demo-001 --step 40 --out models/mine
      bapo export outputs/demo-001 --best
      bapo export outputs/lora-001 --merged
    """
    directory = open_run(run)
    if out is not None and out.exists():
        raise ConfigError(f"{out} exists already; name a folder to create")
    if best:
        if step is not None:
            raise ConfigError("--best and --step both choose a checkpoint; remove one of them")
        step = best_step(directory)
    is_adapter = not merged and load_resolved(directory.config_path).model.lora is not None
    say(str(exported(directory, step, out, adapter=is_adapter)))


def best_step(run: RunDirectory) -> int:
    """Step of the checkpoint whose weights measured best. Raises: ConfigError if these have no checkpoint."""
    found = best_first(measured(run.read_evaluations(), load_resolved(run.config_path).evaluation.best_measure))
    if not found:
        raise ConfigError(f"run {run.path} has no held-out measurement, so no best weights; choose some with --step N")
    best, kept = found[0], run.checkpoint_steps()
    if best.step in kept:
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


def exported(run: RunDirectory, step: int | None, out: Path | None = None, *, adapter: bool = False) -> Path:
    """The folder with the model of a checkpoint, written if it does not exist.

    Args:
        step: None: the latest checkpoint.
        out: None: in the checkpoint.
        adapter: of a run with LoRA, its adapter instead.
    Raises: ConfigError if there is no such checkpoint.
    """
    steps = run.checkpoint_steps()
    if not steps:
        raise ConfigError(f"run {run.path} has no checkpoint yet")
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise ConfigError(f"run {run.path} has no checkpoint of step {chosen}; available: {', '.join(map(str, steps))}")
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
