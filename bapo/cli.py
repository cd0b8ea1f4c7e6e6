"""The `bapo` command. Every mistake is one clear message and an exit code from `bapo.errors`; `--help` has examples."""

from __future__ import annotations

import sys

import typer

from bapo.commands import (
    buffer,
    comparing,
    configs,
    explain,
    looks,
    replay,
    reward,
    runs,
    simulate,
    study,
    tokens,
    track,
    view,
)
from bapo.commands.arguments import TAKES_OVERRIDES
from bapo.errors import BapoError
from bapo.plain_text import plain_lines

app = typer.Typer(
    name="bapo",
    help="BAPO: off-policy RL post-training of language models with verifiable rewards.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(context_settings=TAKES_OVERRIDES)(runs.train)
app.command(context_settings=TAKES_OVERRIDES)(runs.up)
app.command(context_settings=TAKES_OVERRIDES)(runs.create)
app.command("eval", context_settings=TAKES_OVERRIDES)(runs.evaluate)
app.command()(study.study)
app.command()(looks.watch)
app.command()(view.view)
app.command()(track.track)
app.command()(looks.scale)
app.command()(comparing.compare)
app.command()(comparing.report)
app.command(context_settings=TAKES_OVERRIDES)(looks.doctor)
app.command(context_settings=TAKES_OVERRIDES)(simulate.simulate)
app.command()(explain.explain)
app.command()(replay.replay)
app.add_typer(buffer.app, name="buffer")
app.add_typer(configs.app, name="config")
app.add_typer(reward.app, name="reward")
app.add_typer(tokens.app, name="tokens")


def main() -> None:
    """Entry point: an error of ours ends with its message and exit code, without a traceback."""
    try:
        app()
    except BapoError as error:
        # Of a file or a service of somebody else it repeats whatever stands there.
        typer.secho(f"{type(error).__name__}: {plain_lines(str(error))}", fg=typer.colors.RED, err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
