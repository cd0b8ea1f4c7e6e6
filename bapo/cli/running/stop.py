"""`bapo stop`: stop a run on this machine, like Ctrl-C in its terminal."""

from __future__ import annotations

import os
import platform
import signal
import time
from collections.abc import Mapping
from typing import Annotated, Any

import psutil
import typer

from bapo.cli.arguments import Run, Yes, confirm, open_run, started_line, waiting
from bapo.cli.running.runs import state_name, state_of
from bapo.config.load import load_resolved
from bapo.core.errors import ConfigError, DeadlineError
from bapo.core.text import plain
from bapo.runtime.run_directory.layout import UNDER_WAY, RunDirectory

POLL_EVERY_S = 0.1
LAUNCHER = "services.launcher"


def stop(
    run: Run,
    yes: Yes = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", metavar="S", min=0.1, help="Exit code 5 if it has not stopped by then.")
    ] = 60.0,
) -> None:
    """Stop a running run gracefully, like Ctrl-C; it can be resumed from its latest checkpoint.

    Examples:

      bapo stop outputs/demo-001
      bapo stop latest --yes
    """
    directory = open_run(run)
    fields = directory.read_run()
    typer.echo(plain(started_line(directory)), err=True)
    launcher = _launcher(directory, fields)
    confirm("stop it?", yes=yes)
    began = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    with waiting(f"stopping {directory.path}: workers, services, Redis"):
        while _lives(launcher):
            if time.monotonic() - began > timeout_s:
                raise DeadlineError(
                    f"run {directory.path} has not stopped within {timeout_s:.0f} s; its launcher (pid "
                    f"{launcher.pid}) is still running: run bapo stop again to kill it"
                )
            time.sleep(POLL_EVERY_S)
    typer.echo(f"stopped after {time.monotonic() - began:.1f} s{_how_to_resume(directory)}")


def _how_to_resume(run: RunDirectory) -> str:
    """The command that resumes what the launcher did, from the verb in run.json."""
    fields = run.read_run()
    is_over = fields.get("status") == "finished" or not {"train", "buffer"} & set(fields.get("command") or ())
    return "" if is_over else f"\n{run.how_to_resume}"


def _launcher(run: RunDirectory, fields: Mapping[str, Any]) -> psutil.Process:
    """The launcher process of the run. Raises: ConfigError if there is none on this machine."""
    if fields.get("status") is None and state_of(run).state == "running":
        is_sft = load_resolved(run.config_path).sft is not None
        how = "Ctrl-C in the terminal of bapo sft" if is_sft else "docker compose stop, or kubectl"
        raise ConfigError(f"run {run.path} has no launcher: stop it with {how}")
    state = state_name(run, fields)  # of run.json alone: a run whose other records are damaged can be stopped, too
    if state not in UNDER_WAY:
        raise ConfigError(f"run {run.path} is not running: it is {state}")
    host = fields.get("host")
    if host not in (None, platform.node()):
        raise ConfigError(f"run {run.path} was started on {host}: run bapo stop there")
    try:
        found = psutil.Process(int(fields["pid"]))
        is_launcher = any(LAUNCHER in word for word in found.cmdline())
    except (psutil.Error, KeyError, ValueError):
        is_launcher = False
    # The pid of a killed launcher may have been reused.
    if not is_launcher or found.pid == os.getpid():
        raise ConfigError(f"run {run.path} is not running: its launcher (pid {fields.get('pid')}) has exited")
    return found


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
