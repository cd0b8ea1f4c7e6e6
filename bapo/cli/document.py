"""Make `docs/cli.md` from the commands: `python -m bapo.cli.document [FILE]`."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import typer

from bapo.cli.app import app
from bapo.core.errors import BapoError

PAGE = Path("docs/cli.md")

INTRODUCTION = """\
# Command line

<!-- Made by `python -m bapo.cli.document` from bapo/cli: edit those. -->

RUN is a run directory, such as `outputs/demo-001`, or `latest`. Commands that take a configuration take files, presets
and overrides (`--learner.lr 1e-4`): [configuration.md](configuration.md). `bapo --install-completion` sets up your
shell.
"""
EXIT_CODES = {
    0: "finished",
    1: "crash, or a no to a question; the launcher retries a part that ends with it",
    2: "the configuration, a file, a right or a request is wrong: fix it, then start again",
    3: "Redis, a service or the disk was unavailable beyond its deadline",
    4: "training diverged: a value is NaN or infinite",
    5: "a deadline passed, or the run stalled with `supervision.stall_ends_run`",
    6: "a learner rank lost another rank; never the cause",
    130: "ended by Ctrl-C",
}


def document() -> str:
    """The page."""
    command: Any = typer.main.get_command(app)
    context = click.Context(command, info_name="bapo")
    return "\n".join([INTRODUCTION, *_group(command, context), *_exit_codes()])


def _group(group: Any, context: click.Context) -> Iterator[str]:
    """Commands in the order of `--help`, panel by panel; those of a group below it."""
    panel = None
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        inner = click.Context(command, parent=context, info_name=name)
        found = getattr(command, "rich_help_panel", None)
        if isinstance(found, str) and found != panel and context.parent is None:
            panel = found
            yield f"## {panel}\n"
        if hasattr(command, "list_commands"):
            yield f"### `{inner.command_path}`\n\n{command.help}\n"
            yield from _group(command, inner)
        else:
            yield from _command(command, inner)


def _command(command: Any, context: click.Context) -> Iterator[str]:
    level = "####" if context.parent and context.parent.parent else "###"
    usage = " ".join(command.collect_usage_pieces(context))
    text, _, examples = (command.help or "").partition("Examples:")
    yield f"{level} `{context.command_path}`\n\n{text.strip()}\n"
    yield f"```text\n{context.command_path} {usage}\n```\n"
    rows = [row for parameter in command.get_params(context) if (row := _row(parameter, context))]
    if rows:
        yield "\n".join(["| option | meaning |", "|---|---|", *rows]) + "\n"
    if examples.strip():
        yield f"```sh\n{textwrap.dedent(examples.strip(chr(10)))}\n```\n"


def _row(parameter: Any, context: click.Context) -> str | None:
    record = parameter.get_help_record(context)
    if parameter.name == "help" or not record:
        return None
    name, meaning = (" ".join(part.split()).replace("|", "\\|") for part in record)
    name = re.sub(r" <\S+>$", "", name)
    return f"| `{name}` | {meaning} |"


def _exit_codes() -> Iterator[str]:
    known = {error.exit_code for error in _errors(BapoError)}
    assert known <= EXIT_CODES.keys(), f"no words for exit codes {known - EXIT_CODES.keys()}"
    yield "## Exit codes\n"
    yield "\n".join(["| code | meaning |", "|---|---|", *(f"| {code} | {text} |" for code, text in EXIT_CODES.items())])
    yield ""


def _errors(root: type[BapoError]) -> Iterator[type[BapoError]]:
    yield root
    for error in root.__subclasses__():
        yield from _errors(error)


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else PAGE).write_text(document(), encoding="utf-8")
