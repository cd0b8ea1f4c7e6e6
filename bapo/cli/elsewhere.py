"""Commands of the package `studies`, which not every installation has: the images of the services leave it out.

`bapo` starts without it. It is imported when one of its commands is called, or listed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer

from bapo.cli.help import Command, Group
from bapo.core.errors import ConfigError


def studies(command: str) -> Any:
    """The module with the functions of its commands. Raises: ConfigError where it is not installed."""
    try:
        return import_module("studies.commands")
    except ModuleNotFoundError as error:
        if error.name not in ("studies", "studies.commands"):
            raise
        raise ConfigError(
            f"bapo {command} needs the package `studies`, which is not installed here (the images of the services "
            "leave it out); call it where all of bapo is installed, with the same run directories"
        ) from error


def said_to_be_missing(context: typer.Context) -> None:
    """In the package `studies`, which is not installed here."""
    studies(str(context.info_name))


class OfStudies(Command):
    """Stands for a command until it is looked up, and where its package is not installed."""

    def found(self) -> Any:
        """The command itself; this one where it is missing, which then says so."""
        try:
            function = getattr(studies(str(self.name)), str(self.name))
        except ConfigError:
            return self
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(self.name, cls=Command, rich_help_panel=self.rich_help_panel)(function)
        return typer.main.get_command(app)


class Root(Group):
    """The commands of `bapo`."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        return found.found() if isinstance(found, OfStudies) else found
