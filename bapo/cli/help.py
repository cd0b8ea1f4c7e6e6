"""Formatting of `--help`: groups of commands, flags without a type, and examples that fit in 80 columns.

A docstring is a one-line summary, paragraphs, and examples at the end:

    Examples:

      bapo train deploy/configs/demo.toml

Paragraphs wrap at the terminal width; indented lines are kept.
"""

from __future__ import annotations

import inspect
from enum import StrEnum
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

HELP = {"help_option_names": ["-h", "--help"]}
"""Click settings of every command, inherited from the application."""


class Panel(StrEnum):
    """Groups of commands, in the order of `bapo --help`."""

    TRAIN = "Train"
    RUNS = "Runs"
    INSPECT = "Inspect and compare"
    BUFFER = "Buffer"
    CONFIGURE = "Configure"
    DATA = "Data and rewards"
    DEPLOY = "Deploy"


def unwrapped(text: str) -> str:
    """Join each paragraph of a docstring into one line; indented lines are kept."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else part.replace("\n", " ") for part in paragraphs)


class Command(TyperCommand):
    """A command with help as described in this module."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.help = unwrapped(self.help or "")

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


class Group(TyperGroup):
    """A group of commands with the same help."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Commands by panel, then in order of registration."""
        return sorted(super().list_commands(ctx), key=lambda name: _panel_index(self.commands[name]))


def _panel_index(command: Any) -> int:
    panels = [panel.value for panel in Panel]
    return panels.index(command.rich_help_panel) if command.rich_help_panel in panels else 0


def group(text: str) -> typer.Typer:
    """A group of commands below `bapo`."""
    return typer.Typer(help=text, cls=Group, no_args_is_help=True)


def _without_types(params: list[Any]) -> list[Any]:
    """Remove the metavar of flags, which take no value."""
    for param in params:
        if isinstance(param, TyperOption) and param.is_flag and param.metavar is None:
            param.metavar = ""
    return params
