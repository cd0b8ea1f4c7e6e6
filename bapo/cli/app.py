"""The `bapo` command. Every mistake is one message and an exit code of `bapo.core.errors`; `--help` has examples."""

from __future__ import annotations

import sys

import typer

from bapo.cli import compare, config, monitor, replay, reward, study, tokens, train, whatif
from bapo.cli.arguments import TAKES_OVERRIDES
from bapo.cli.buffer import app as buffer
from bapo.core.errors import BapoError
from bapo.core.text import plain_lines

app = typer.Typer(
    name="bapo",
    help="BAPO: off-policy RL post-training of language models with verifiable rewards.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(context_settings=TAKES_OVERRIDES)(train.train)
app.command(context_settings=TAKES_OVERRIDES)(train.up)
app.command(context_settings=TAKES_OVERRIDES)(train.create)
app.command("eval", context_settings=TAKES_OVERRIDES)(train.evaluate)
app.command()(study.study)
app.command()(monitor.watch)
app.command()(monitor.view)
app.command()(monitor.track)
app.command()(monitor.scale)
app.command()(compare.compare)
app.command()(compare.report)
app.command(context_settings=TAKES_OVERRIDES)(monitor.doctor)
app.command(context_settings=TAKES_OVERRIDES)(whatif.simulate)
app.command()(whatif.explain)
app.command()(replay.replay)
app.add_typer(buffer.app, name="buffer")
app.add_typer(config.app, name="config")
app.add_typer(reward.app, name="reward")
app.add_typer(tokens.app, name="tokens")


def main() -> None:
    """Entry point: an error of ours ends with its message and exit code, without a traceback."""
    try:
        app()
    except BapoError as error:
        # From a file or a service of others it repeats whatever stands there.
        typer.secho(f"{type(error).__name__}: {plain_lines(str(error))}", fg=typer.colors.RED, err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
