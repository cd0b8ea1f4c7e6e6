"""`bapo logs`: print and follow the logs of a run's processes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated

import typer

from bapo.cli.arguments import Run, open_run
from bapo.core.errors import ConfigError, did_you_mean
from bapo.core.text import plain
from bapo.runtime.logs import LogFollower
from bapo.runtime.run_directory.layout import RunDirectory

POLL_EVERY_S = 0.5


def logs(
    run: Run,
    part: Annotated[
        str | None, typer.Argument(metavar="PART", help="A process, such as learner; default: all.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow new lines until the run ends.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=0, help="Number of last lines to print of each log.")
    ] = 20,
) -> None:
    """Print the last log lines of each process of a run, or of one.

    The files are in RUN/logs. Parts: learner, rollout_server, buffer_service, scheduler, evaluator, dashboard, redis,
    and one per worker.

    Examples:

      bapo logs outputs/demo-001
      bapo logs -f outputs/demo-001 learner
      bapo logs latest rollout_server -n 200
    """
    directory = open_run(run)
    if part is not None:
        _refuse_unknown(directory, part)
    follower = LogFollower(directory.logs_path, part)
    parts = follower.parts()
    if not parts and not follow:
        typer.echo(f"run {directory.path} has no logs yet", err=True)
    for name in parts:
        latest = follower.latest(name, lines)
        if part is None:
            typer.secho(f"== {name} ==", bold=True)
        for line in latest:
            typer.echo(plain(line))
    if follow:
        _follow(directory, follower, is_prefixed=part is None)


def _follow(run: RunDirectory, follower: LogFollower, *, is_prefixed: bool) -> None:
    try:
        while True:
            may_write_more = run.is_under_way  # read first, so that the last lines of a run are printed, too
            _print(follower.new_lines(), is_prefixed=is_prefixed)
            if not may_write_more:
                return
            time.sleep(POLL_EVERY_S)
    except KeyboardInterrupt:
        return


def _print(found: Iterable[tuple[str, str]], *, is_prefixed: bool) -> None:
    for name, line in found:
        typer.echo(f"[{name}] {plain(line)}" if is_prefixed else plain(line))


def _refuse_unknown(run: RunDirectory, part: str) -> None:
    known = LogFollower(run.logs_path).parts()
    if known and part not in known:
        raise ConfigError(f"run {run.path} has no log {part!r}{did_you_mean(part, known)}; it has {', '.join(known)}")
    if not known:
        raise ConfigError(f"run {run.path} has no logs yet")
