"""`bapo sft`: supervised fine-tuning on conversations, with the learner of `bapo train` and nothing else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bapo.cli.arguments import Tokens, free_name, open_run, say, split_tokens
from bapo.cli.training.start import create_run
from bapo.config.check import is_resolved, read_layer, shown
from bapo.config.layers import Layer, dotted, file_layer, flatten, override_layers
from bapo.config.load import load_config, load_resolved
from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.runtime.file_digest import digest_of
from bapo.runtime.run_directory.layout import RunDirectory

DEFAULTS = (
    "--loss.name=sft", "--loss.ratio_mode=direct", "--loss.importance_level=none", "--loss.aggregation=token_mean",
    "--loss.kl_coef=0", "--loss.entropy_coef=0", "--algorithm.batch_size=64", "--cadence.max_steps_ahead=0",
    "--rollout.weight_transfer=file", "--learner.lr=1e-5", "--learner.lr_schedule=cosine",
    "--learner.minibatch_size=1", "--learner.epochs=1", "--learner.reset_optimizer=false", "--rollout.temperature=1",
    "--diagnostics.texts=0",
)  # fmt: skip
"""Below what the command line says, and above a file, which may be that of the run that follows."""
LENGTH = "give --epochs"
BATCHES = "a step is one update by algorithm.batch_size conversations"
DIGEST = "sft_data"
"""Key of run.json."""
OWN = {
    "sft.data": "it is the first argument", "run.num_steps": LENGTH, "learner.epochs": LENGTH,
    "rollout.temperature": "the likelihood is that of temperature 1", "learner.minibatch_size": BATCHES,
    "cadence.weight_sync_interval": BATCHES, "cadence.reevaluation_interval": BATCHES,
    "learner.port": "a free one is taken",
}  # fmt: skip
"""What the command line cannot set, and what to do; in a file it has no effect."""


def sft(
    data: Annotated[str, typer.Argument(metavar="DATA.jsonl", help="Conversations.")],
    config: Tokens = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data; default 1.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run DATA.")] = False,
) -> None:
    """Fine-tune a model on conversations, before reinforcement learning; makes a model folder for `bapo train`.

    Rows are `{"messages": [...]}`, of which the assistant's messages train, or `{"prompt": ..., "completion": ...}`. A
    step trains `algorithm.batch_size` conversations. LoRA, several ranks and checkpoints work as in `bapo train`.

    CONFIG may be that of the run that follows: its length, batch, rate, loss and temperature are not taken, which is
    said; set them on the command line.

    Examples:

      bapo sft chats.jsonl --model.path Qwen/Qwen3-0.6B --epochs 2
      bapo sft chats.jsonl --model.path models/chain-tiny --learner.lr 1e-4 --algorithm.batch_size 32
      bapo sft --resume outputs/chats-sft-001
    """
    if resume:
        run = open_run(data)
        if load_resolved(run.config_path).sft is None:
            raise ConfigError(f"{run.path} is not a run of bapo sft: bapo train --resume {run.path}")
        _refuse_other_data(run)
        _learn(run, "--resume")
    num_rows = _count(data)
    files, overrides = split_tokens(config or [])
    names = [*_settings(override_layers(overrides))]
    if taken := [name for name in names if name in OWN]:
        raise ConfigError(f"bapo sft sets {taken[0]} itself: {OWN[taken[0]]}")
    given = load_config(files, [*DEFAULTS, *overrides])
    batch_size, epochs = given.algorithm.batch_size, epochs or (given.sft.epochs if given.sft else 1)
    num_steps = epochs * -(-num_rows // batch_size)
    own = [f"--sft.data={json.dumps(data)}", f"--sft.epochs={epochs}", *_of_length(num_steps, batch_size)]
    if "learner.warmup_steps" not in names:  # of a run of thousands of steps: a short one would never reach its rate
        own.append(f"--learner.warmup_steps={min(given.learner.warmup_steps, num_steps // 10)}")
    if "run.name" not in names:
        own.append(f"--run.name={free_name(Path(given.run.root), f'{Path(data).stem[:50]}-sft')}")
    resolved = load_config(files, [*DEFAULTS, *overrides, *own])
    run = create_run(resolved)
    run.update_run(**{DIGEST: digest_of(Path(data))})
    rate = f"learning rate {given.learner.lr:g} ({given.learner.lr_schedule})"
    say(f"run directory {run.path}\n{num_rows} conversations, {num_steps} steps of {batch_size}, {rate}")
    if left := ", ".join(_not_taken(files, names, resolved)):
        say(f"bapo sft does not take from {', '.join(files)}: {left}; set on the command line what you want")
    _learn(run)


def _of_length(num_steps: int, batch_size: int) -> list[str]:
    """What `OWN` says of sizes, as overrides."""
    return [
        f"--run.num_steps={num_steps}", f"--learner.minibatch_size={batch_size}", "--learner.port=0",
        f"--cadence.weight_sync_interval={num_steps}", f"--cadence.reevaluation_interval={num_steps}",
    ]  # fmt: skip


def _settings(layers: Iterable[Layer]) -> dict[str, Any]:
    """Dotted key -> value of what the layers set, under today's names."""
    return {dotted(key): value for layer in layers for key, value in flatten(read_layer(layer)[0])}


def _not_taken(files: Sequence[str], names: Collection[str], config: Config) -> list[str]:
    """`learner.lr = 3e-05 (here 1e-05)`: what the files set and `bapo sft` sets otherwise. Nothing of a complete
    config, as that of a run: most of its values are defaults.

    Args:
        names: keys that the command line sets.
        config: of the run.
    """
    written = _settings(layer for layer in map(file_layer, files) if not is_resolved(layer))
    here = {dotted(key): value for key, value in flatten(config.model_dump())}
    set_here = {*_settings(override_layers(DEFAULTS)), *OWN, "learner.warmup_steps", "run.name"} - set(names)
    return [
        f"{key} = {shown(value)} (here {shown(here[key])})"
        for key, value in written.items()
        if key in set_here and value != here[key]
    ]


def _refuse_other_data(run: RunDirectory) -> None:
    """The order of rows depends on their number: after a change some would train twice, others never."""
    config, digest = load_resolved(run.config_path), run.read_run().get(DIGEST)
    data = Path(config.sft.data if config.sft else "")
    if digest is not None and data.is_file() and digest_of(data) != digest:
        raise ConfigError(f"{data} has changed since run {run.path} began: undo the change, or start a new run")


def _count(data: str) -> int:
    if Path(data).suffix != ".jsonl":
        raise ConfigError(f"{data} is not a .jsonl file, one conversation per line")
    try:
        with Path(data).open("rb") as file:
            num = sum(1 for line in file if line.strip())
    except OSError as error:
        raise ConfigError(f"cannot read {data}: {error.strerror}") from error
    if num == 0:
        raise ConfigError(f"{data} has no rows")
    return num


def _learn(run: RunDirectory, *flags: str) -> None:
    """Exec the learner, which then owns Ctrl-C and exit code."""
    sys.stdout.flush()
    command = ["-m", "learner", "--config", str(run.config_path), "--run-dir", str(run.path), *flags]
    os.execv(sys.executable, [sys.executable, *command])  # noqa: S606 - no shell
