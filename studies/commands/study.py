"""`bapo study`: run methods x seeds on one machine."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from bapo.runtime.machine import GIB, runs_at_once
from bapo.runtime.run_directory.files import locked
from studies.plan import Study, read_study
from studies.runner import (
    Outcome,
    Runner,
    StudyProgress,
    end_lines,
    make_folder,
    mean_seconds,
    plan_lines,
    progress_line,
)
from studies.state import Results, changed, inspect_run

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
) -> None:
    """Run several methods with several seeds, resuming where an earlier call stopped.

    Ctrl-C stops the active runs, which the next call resumes; a failed run does not stop the others.

    Examples:

      bapo study deploy/configs/study-chain.toml --dry-run
      bapo study deploy/configs/study-chain.toml --only grpo --only bapo
    """
    planned = read_study(file, only or [])
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
