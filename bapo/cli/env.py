"""`bapo env install`: Pythons for environments of agents whose packages contradict ours."""

from __future__ import annotations

from typing import Annotated

import typer

from bapo.cli.help import Command, group
from bapo.runtime.python_environments import PINNED, install, is_installed, python_of

app = group("Install the packages of agents' environments: verifiers, OpenEnv, skyrl-gym.")


@app.command("install", cls=Command)
def install_one(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(PINNED)}.")],
) -> None:
    """Make a Python with the pinned version of a package, and print its path; one that is there is kept.

    Runs with agents.rollout = "NAME:..." use it, unless agents.python names another.

    Examples:

      bapo env install verifiers
    """
    typer.echo(install(name))


@app.command("list", cls=Command)
def list_all() -> None:
    """Show the packages, and the Python of each that is installed.

    Examples:

      bapo env list
    """
    for name, package in PINNED.items():
        typer.echo(f"{package:<20} {python_of(name) if is_installed(name) else 'not installed'}")
