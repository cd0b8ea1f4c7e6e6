"""`bapo study`: run methods x seeds on one machine."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from bapo.analysis.study.archive import pack, unpack
from bapo.analysis.study.plan import Study, read_study
from bapo.analysis.study.runner import (
    Outcome,
    Runner,
    StudyProgress,
    end_lines,
    make_folder,
    mean_seconds,
    plan_lines,
    progress_line,
)
from bapo.analysis.study.state import Results, changed, inspect_run
from bapo.core.errors import ConfigError
from bapo.runtime.machine import GIB, runs_at_once
from bapo.runtime.progress import progress
from bapo.runtime.run_directory.files import locked

INTERRUPTED = 130
FAILED = 1
CORES_PER_RUN = 1.0
"""Less than the 1.3 cores that a single run uses (docs/results.md): engine and learner alternate, so one run per core
keeps all cores busy."""
QUIET_S = 60.0
"""Interval of progress lines without a terminal."""


def study(
    file: Annotated[str, typer.Argument(metavar="STUDY.toml", help="Methods, seeds and common settings.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and its estimated time.")] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="METHOD", help="Only this method; may be repeated.")
    ] = None,
    budget_s: Annotated[
        float | None, typer.Option("--budget-s", metavar="S", help="Start no run that would end after this time.")
    ] = None,
    parallel: Annotated[
        int | None, typer.Option("--parallel", metavar="N", min=1, help="Concurrent runs; overrides the file.")
    ] = None,
    pack_into: Annotated[
        Path | None, typer.Option("--pack", metavar="FILE.tar.xz", help="Write finished runs to a file.")
    ] = None,
    unpack_from: Annotated[
        Path | None, typer.Option("--unpack", metavar="FILE.tar.xz", help="Read finished runs from a file.")
    ] = None,
) -> None:
    """Run several methods with several seeds, resuming where an earlier call stopped.

    Ctrl-C stops the active runs, which the next call resumes; a failed run does not stop the others.

    Examples:

      bapo study deploy/configs/study-chain.toml --dry-run
      bapo study deploy/configs/study-chain.toml --only grpo --only bapo
      bapo study deploy/configs/study-chain.toml \\
          --unpack docs/studies/chain.tar.xz
    """
    planned = read_study(file, only or [])
    if pack_into or unpack_from:
        _move(planned, pack_into, unpack_from)
        return
    changed(planned.runs)
    at_once = parallel or _at_once(planned)
    console = Console(highlight=False)
    found = [inspect_run(run) for run in planned.runs]
    for line in plan_lines(planned, found, mean_seconds(Results(planned.path).read()), at_once):
        console.print(line, soft_wrap=True)
    if dry_run:
        return
    make_folder(planned)
    with locked(planned.path / ".lock", f"study {planned.path} is already running in another process"):
        outcome = _run(planned, at_once, budget_s, console)
    for line in end_lines(planned, outcome, file):
        console.print(Text(line, "red" if outcome.failed else ""), soft_wrap=True)
    if outcome.interrupted or (outcome.left and budget_s is None):
        raise typer.Exit(INTERRUPTED)
    if outcome.failed:
        raise typer.Exit(FAILED)


def _move(planned: Study, pack_into: Path | None, unpack_from: Path | None) -> None:
    if pack_into and unpack_from:
        raise ConfigError("--pack and --unpack are mutually exclusive")
    if pack_into:
        with progress(f"packing {planned.path}"):
            packed = pack(planned, pack_into)
        typer.echo(f"{pack_into}: {len(packed.runs)} finished runs packed, {len(packed.left)} are not finished")
        return
    assert unpack_from is not None
    make_folder(planned)
    lock = locked(planned.path / ".lock", f"study {planned.path} is already running in another process")
    with lock, progress(f"unpacking {unpack_from}"):
        moved = unpack(unpack_from, planned)
    typer.echo(f"{planned.path}: {len(moved.runs)} runs unpacked, {len(moved.left)} already existed")


def _run(planned: Study, parallel: int, budget_s: float | None, console: Console) -> Outcome:
    with ExitStack() as stack:
        live = stack.enter_context(Live(console=console, transient=True)) if console.is_terminal else None
        shown_s = -QUIET_S

        def show(seen: StudyProgress) -> None:
            nonlocal shown_s
            if live is not None:
                live.update(Text(progress_line(seen)))
            elif seen.elapsed_s - shown_s >= QUIET_S:
                shown_s = seen.elapsed_s
                console.print(progress_line(seen), soft_wrap=True)

        def say(text: str) -> None:
            console.print(text, soft_wrap=True)

        return Runner(planned, parallel=parallel, say=say, show=show, budget_s=budget_s).run()


def _at_once(planned: Study) -> int:
    wanted = planned.file.study.parallel
    if wanted != "auto":
        return wanted
    cores, free_gib = len(os.sched_getaffinity(0)), psutil.virtual_memory().available / GIB
    return runs_at_once(planned.runs[0].config, cores=cores, free_gib=free_gib, cores_per_run=CORES_PER_RUN)
