"""Shared by commands: CONFIG files with overrides, RUN, confirmation, and exec of the launcher."""

from __future__ import annotations

import datetime
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from bapo.config.check import free_port_overrides
from bapo.config.load import load_config
from bapo.config.tree import LATEST, Config, RunConfig
from bapo.core.errors import ConfigError
from bapo.core.text import plain
from bapo.runtime.run_directory.layout import RunDirectory

AUTO = "auto"
TAKES_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Click settings: `--section.key value` is passed to CONFIG, where `split_tokens` parses it."""

Tokens = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG... [--section.key VALUE]...",
        help="TOML files or preset names; later ones take precedence. Then overrides.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result and errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print the log lines of all processes.")]
FreePorts = Annotated[
    bool, typer.Option("--free-ports", help="Listen on free ports, next to another run on this machine.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def complete_run(incomplete: str) -> list[str]:
    """Shell completion of RUN."""
    paths = [str(path.parent) for path in Path(RunConfig().root).glob("*/config.toml")]
    return [name for name in (LATEST, *sorted(paths)) if name.startswith(incomplete)]


_RUN = typer.Argument(
    metavar="RUN", help="A run directory, such as outputs/demo-001 or demo-001, or latest.", autocompletion=complete_run
)
Run = Annotated[str, _RUN]
"""For commands that change a run or take another argument: required, never inferred."""
RunOrLatest = Annotated[
    str, typer.Argument(metavar="RUN", help="A run directory; default: latest.", autocompletion=complete_run)
]
"""For read-only commands."""


def split_tokens(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split files and overrides in any order: `a.toml --learner.lr 1e-4 b.toml`."""
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
    """Load the config from the arguments of a command. Raises: ConfigError."""
    return load_config(*split_tokens(tokens or []))


def load_named(tokens: Sequence[str] | None, *, free_ports: bool = False) -> Config:
    """The same, with `run.name = "auto"` replaced by the next free number: demo-001, demo-002, ...

    Args:
        free_ports: every port that no override names is 0.
    """
    files, overrides = split_tokens(tokens or [])
    if free_ports:
        with_agents = load_config(files, overrides).agents is not None
        overrides = [*free_port_overrides(with_agents=with_agents), *overrides]
    config = load_config(files, overrides)
    if config.run.name != AUTO:
        return config
    stem = Path(files[-1]).stem if files else "run"
    return load_config(files, [*overrides, "--run.name", free_name(Path(config.run.root), stem)])


def free_name(root: Path, stem: str) -> str:
    """`stem-001`, or the first unused number after it in `root`."""
    number = 1
    while (root / f"{stem}-{number:03d}").exists():
        number += 1
    return f"{stem}-{number:03d}"


def open_run(run: str) -> RunDirectory:
    """Open the run given by the user. Raises: ConfigError."""
    return RunDirectory.open(run_path(run))


def run_path(run: str) -> str:
    """The path of a run: as given; below outputs/ if only a run there has this name; for `latest` the most recently
    modified run in outputs/.

    Raises: ConfigError.
    """
    if run != LATEST:
        below = Path(RunConfig().root) / run
        return str(below) if not Path(run).exists() and (below / "config.toml").is_file() else run
    configs = sorted(Path(RunConfig().root).glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    if not configs:
        raise ConfigError(f"no run in {RunConfig().root}; pass the path of a run directory")
    return str(configs[-1].parent)


def started_line(run: RunDirectory) -> str:
    """Describe the run: its path, and when it was started by which process."""
    fields = run.read_run()
    if not fields.get("pid") or not fields.get("started_at"):
        return f"run {run.path}, not started on this machine"
    at = datetime.datetime.fromtimestamp(float(fields["started_at"])).astimezone()
    return f"run {run.path}, started by process {fields['pid']} at {at:%Y-%m-%d %H:%M:%S}"


def confirm(question: str, *, yes: bool, loses: bool = False) -> None:
    """Ask for confirmation on a terminal; scripts are not asked.

    Args:
        loses: the change is irreversible, so scripts must pass --yes.
    Raises: typer.Abort if declined; ConfigError for a script without --yes.
    """
    if not yes and is_terminal():
        typer.confirm(question, abort=True, err=True)
    elif not yes and loses:
        raise ConfigError(f"{question} Not a terminal: confirm with --yes. Nothing was changed")


def is_terminal() -> bool:
    """Whether stdin and stdout are interactive."""
    return sys.stdin.isatty() and sys.stderr.isatty()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show progress of a slow step on stderr: a spinner on a terminal, else one line."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        console.print(what, markup=False, soft_wrap=True)
        yield


def say(text: str) -> None:
    """Print; in a terminal, lines wrap between words."""
    width = shutil.get_terminal_size().columns
    for line in text.splitlines():
        is_long = sys.stdout.isatty() and len(line) > width
        wrapped = textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) if is_long else [line]
        typer.echo("\n".join(map(plain, wrapped)))  # text from the files of a run may contain control characters


def hand_over(*arguments: str) -> NoReturn:
    """Exec the launcher, which then owns Ctrl-C, terminal and exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "services.launcher", *arguments])  # noqa: S606 - no shell
