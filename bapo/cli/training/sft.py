"""`bapo sft`: supervised fine-tuning on conversations, with the learner of `bapo train` and nothing else."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from bapo.cli.arguments import Tokens, free_name, open_run, say, split_tokens
from bapo.cli.training.start import create_run
from bapo.config.load import load_config, load_resolved
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
    names = [token[2:].partition("=")[0] for token in overrides if token.startswith("--")]
    if taken := [name for name in names if name in OWN]:
        raise ConfigError(f"bapo sft sets {taken[0]} itself: {OWN[taken[0]]}")
    given = load_config(files, [*DEFAULTS, *overrides])
    batch_size, epochs = given.algorithm.batch_size, epochs or (given.sft.epochs if given.sft else 1)
    num_steps = epochs * -(-num_rows // batch_size)
    own = [
        f"--sft.data={json.dumps(data)}", f"--sft.epochs={epochs}", f"--run.num_steps={num_steps}",
        f"--learner.minibatch_size={batch_size}", f"--cadence.weight_sync_interval={num_steps}",
        f"--cadence.reevaluation_interval={num_steps}", "--learner.port=0",
    ]  # fmt: skip
    if "learner.warmup_steps" not in names:  # of a run of thousands of steps: a short one would never reach its rate
        own.append(f"--learner.warmup_steps={min(given.learner.warmup_steps, num_steps // 10)}")
    if not any(token.startswith("--run.name") for token in overrides):
        own.append(f"--run.name={free_name(Path(given.run.root), f'{Path(data).stem[:50]}-sft')}")
    run = create_run(load_config(files, [*DEFAULTS, *overrides, *own]))
    run.update_run(**{DIGEST: digest_of(Path(data))})
    rate = f"learning rate {given.learner.lr:g} ({given.learner.lr_schedule})"
    say(f"run directory {run.path}\n{num_rows} conversations, {num_steps} steps of {batch_size}, {rate}")
    _learn(run)


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
