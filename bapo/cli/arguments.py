"""What commands share: CONFIG files with trailing overrides, names of runs, and the hand-over to the launcher."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from bapo.config.load import load_config
from bapo.config.tree import Config, RunConfig
from bapo.core.errors import ConfigError
from bapo.core.text import plain
from bapo.runtime.run_directory.layout import RunDirectory

AUTO = "auto"
LATEST = "latest"
"""In place of a run directory."""
TAKES_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Click settings: `--section.key value` goes to CONFIG, where `split_tokens` finds it."""

Tokens = Annotated[
    list[str] | None,
    typer.Argument(metavar="CONFIG... [--section.key VALUE]...", help="TOML files or preset names, then overrides."),
]


def split_tokens(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files and overrides, wherever they stand: `a.toml --learner.lr 1e-4 b.toml`."""
    files: list[str] = []
    overrides: list[str] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--"):
            files.append(token)
            continue
        overrides.append(token)
        if "=" not in token and rest:
            overrides.append(rest.pop(0))
    return files, overrides


def load(tokens: Sequence[str] | None) -> Config:
    """The configuration that the arguments of a command mean. Raises: ConfigError."""
    return load_config(*split_tokens(tokens or []))


def load_named(tokens: Sequence[str] | None) -> Config:
    """The same, with `run.name = "auto"` replaced by the next free number: demo-001, demo-002, ..."""
    files, overrides = split_tokens(tokens or [])
    config = load_config(files, overrides)
    if config.run.name != AUTO:
        return config
    stem = Path(files[-1]).stem if files else "run"
    return load_config(files, [*overrides, "--run.name", free_name(Path(config.run.root), stem)])


def free_name(root: Path, stem: str) -> str:
    """`stem-001`, or the first number after it that no run in `root` has."""
    number = 1
    while (root / f"{stem}-{number:03d}").exists():
        number += 1
    return f"{stem}-{number:03d}"


def open_run(run: str) -> RunDirectory:
    """The run that the user names. Raises: ConfigError."""
    return RunDirectory.open(run_path(run))


def run_path(run: str) -> str:
    """The path as it is; of `latest` that of the run in outputs/ that was written to last. Raises: ConfigError."""
    if run != LATEST:
        return run
    configs = sorted(Path(RunConfig().root).glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    if not configs:
        raise ConfigError(f"there is no run in {RunConfig().root}; write the path of one")
    return str(configs[-1].parent)


def say(text: str) -> None:
    """Print; in a terminal no word is broken at its edge."""
    width = shutil.get_terminal_size().columns
    for line in text.splitlines():
        is_long = sys.stdout.isatty() and len(line) > width
        wrapped = textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) if is_long else [line]
        typer.echo("\n".join(map(plain, wrapped)))  # of a run it repeats whatever stands in its files


def hand_over(*arguments: str) -> NoReturn:
    """Become the launcher: Ctrl-C, terminal and exit code are then its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "services.launcher", *arguments])  # noqa: S606 - no shell
