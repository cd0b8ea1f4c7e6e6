"""The `bapo` command. Errors are printed as one message, with an exit code from `bapo.core.errors`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

import bapo
from bapo.cli import config, env, reward, tokens
from bapo.cli.arguments import TAKES_OVERRIDES
from bapo.cli.buffer import files, inspect, maintain
from bapo.cli.elsewhere import OfStudies, Root, said_to_be_missing
from bapo.cli.help import HELP, Command, Panel, group
from bapo.cli.recorded import replay, report, whatif
from bapo.cli.running import agent, logs, monitor, runs, stop
from bapo.cli.training import export, init, sft, train, up
from bapo.core.errors import BapoError
from bapo.core.text import plain_lines
from bapo.runtime.standard_streams import print_any_text

app = typer.Typer(
    name="bapo",
    help="Post-train language models with reinforcement learning from verifiable rewards, off-policy (BAPO, ICLR 2026)."
    "\n\nNew here? bapo init writes a config, bapo train runs it.",
    cls=Root,
    context_settings=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


buffer = group("Inspect, check, export and edit the buffer of a running run.")
for command in (
    inspect.stats, files.export, files.snapshot, files.restore, maintain.drop, maintain.verify,
):  # fmt: skip
    buffer.command(cls=Command)(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bapo {bapo.__version__}")
        raise typer.Exit


@app.callback()
def _bapo(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of `bapo` itself."""


def _add(panel: Panel, function: Callable[..., Any], name: str | None = None, *, overrides: bool = False) -> None:
    settings = TAKES_OVERRIDES if overrides else None
    app.command(name, cls=Command, rich_help_panel=panel.value, context_settings=settings)(function)


def _add_of_studies(panel: Panel, name: str) -> None:
    options = app.command(name, cls=OfStudies, rich_help_panel=panel.value, context_settings=TAKES_OVERRIDES)
    options(said_to_be_missing)


_add(Panel.TRAIN, init.init)
_add(Panel.TRAIN, train.train, overrides=True)
_add(Panel.TRAIN, train.evaluate, "eval", overrides=True)
_add(Panel.TRAIN, sft.sft, overrides=True)
_add(Panel.TRAIN, export.export)
_add_of_studies(Panel.TRAIN, "study")
_add(Panel.RUNS, runs.runs)
_add(Panel.RUNS, runs.status)
_add(Panel.RUNS, monitor.watch)
_add(Panel.RUNS, logs.logs)
_add(Panel.RUNS, monitor.scale)
_add(Panel.RUNS, agent.agent)
_add(Panel.RUNS, stop.stop)
_add(Panel.INSPECT, monitor.view)
_add(Panel.INSPECT, report.report)
_add_of_studies(Panel.INSPECT, "compare")
_add(Panel.INSPECT, monitor.track)
_add(Panel.INSPECT, whatif.explain)
_add(Panel.INSPECT, whatif.simulate, overrides=True)
_add(Panel.INSPECT, replay.replay)
app.add_typer(buffer, name="buffer", rich_help_panel=Panel.BUFFER.value)
app.add_typer(config.app, name="config", rich_help_panel=Panel.CONFIGURE.value)
_add(Panel.CONFIGURE, monitor.doctor, overrides=True)
app.add_typer(reward.app, name="reward", rich_help_panel=Panel.DATA.value)
app.add_typer(env.app, name="env", rich_help_panel=Panel.DATA.value)
_add(Panel.DEPLOY, up.up, overrides=True)
_add(Panel.DEPLOY, up.create, overrides=True)
app.add_typer(tokens.app, name="tokens", rich_help_panel=Panel.DEPLOY.value)


def main() -> None:
    """Entry point: BAPO errors exit with their message and exit code, without a traceback."""
    print_any_text()
    try:
        app()
    except BapoError as error:
        # Messages contain text from files and services, which may include control characters.
        typer.secho(f"error: {plain_lines(str(error))}", fg=typer.colors.RED, err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
