"""Run a study: which run comes next, the launcher processes, and what the user reads about them.

A run is a launcher process of its own with its output in logs/<run>.log. A run that fails does not stop the others. On
Ctrl-C every launcher ends its run; when this process is killed, the kernel signals them.
"""

from __future__ import annotations

import heapq
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bapo.config.load import dump_toml, load_resolved
from bapo.core.text import duration
from bapo.runtime.process import Interrupts, dying_with_parent
from bapo.runtime.run_directory.best import best_steps, measured
from bapo.runtime.run_directory.files import replace_file, storing
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.pruning import remove_checkpoint
from studies.plan import PlannedRun, Study
from studies.state import FINISHED, Results, State, StudyRun, inspect_run


@dataclass(frozen=True, slots=True)
class Estimates:
    by_method: Mapping[str, float]

    def of(self, found: StudyRun) -> float | None:
        """Seconds that this run still takes: by its method, else by the mean of all methods; None: nothing is known."""
        if not self.by_method:
            return None
        every = sum(self.by_method.values()) / len(self.by_method)
        return self.by_method.get(found.run.method, every) * found.share_left


def mean_seconds(rows: Iterable[Mapping[str, object]]) -> Estimates:
    """From the lines of results.jsonl: only runs that one start finished have a time that says something."""
    seconds: dict[str, list[float]] = {}
    for row in rows:
        if row.get("status") == "finished" and row.get("in_one_start"):
            seconds.setdefault(str(row["method"]), []).append(float(str(row["wall_s"])))
    return Estimates({method: sum(values) / len(values) for method, values in seconds.items()})


def next_run(waiting: Sequence[StudyRun], estimates: Estimates, left_s: float | None) -> StudyRun | None:
    """The first run that is not finished and that fits; None when none does.

    Args:
        left_s: of the budget; None without one. A run whose time is not known yet counts as fitting.
    """
    for found in waiting:
        needed_s = estimates.of(found)
        if found.state is not State.FINISHED and (left_s is None or (left_s > 0 and (needed_s or 0.0) <= left_s)):
            return found
    return None


def rest_s(
    waiting: Sequence[StudyRun], running: Sequence[tuple[StudyRun, float]], estimates: Estimates, parallel: int
) -> float | None:
    """Seconds until all have ended, each free place taking the next run; None while no run was ever measured.

    Args:
        running: each with its age in seconds.
    """
    ends = [max(0.0, (estimates.of(found) or 0.0) - age_s) for found, age_s in running]
    heapq.heapify(ends)
    last = max(ends, default=0.0)
    for found in waiting:
        needed_s = estimates.of(found)
        if needed_s is None:
            return None
        start = heapq.heappop(ends) if len(ends) >= parallel else 0.0
        heapq.heappush(ends, start + needed_s)
        last = max(last, start + needed_s)
    return last if estimates.by_method else None


POLL_S = 0.5
NOT_KEPT = ("redis", "weights", "batches")
"""Folders of a finished run that its study removes."""


class Process(Protocol):
    def poll(self) -> int | None: ...

    def send_signal(self, sig: int) -> None: ...


@dataclass(kw_only=True)
class Running:
    found: StudyRun
    process: Process
    started_s: float

    @property
    def name(self) -> str:
        return self.found.run.name

    def step(self) -> int:
        return len(RunDirectory(self.found.run.path).read_metrics())


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyProgress:
    num_runs: int
    finished: int
    failed: int
    waiting: tuple[StudyRun, ...]
    running: tuple[tuple[StudyRun, int, float], ...]
    """(run, its step, its age in seconds)."""
    estimates: Estimates
    parallel: int
    elapsed_s: float


@dataclass(kw_only=True)
class Outcome:
    failed: list[dict[str, Any]] = field(default_factory=list)
    """Lines of results.jsonl."""
    interrupted: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Runs that were not started: the user ended the study, or the budget was too small for them."""


class Runner:
    def __init__(
        self,
        study: Study,
        *,
        parallel: int,
        say: Callable[[str], None],
        show: Callable[[StudyProgress], None],
        budget_s: float | None = None,
        start: Callable[[StudyRun, Path], Process] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._study = study
        self._parallel = parallel
        self._say = say
        self._show = show
        self._budget_s = budget_s
        self._start = start or start_launcher
        self._sleep = sleep
        self._now = now
        self._results = Results(study.path)
        self._running: list[Running] = []
        self._num_finished = 0
        self._started_s = now()

    def run(self) -> Outcome:
        """Everything that is not finished yet and that fits. Raises: StorageError, ConfigError."""
        make_folder(self._study)
        waiting = [inspect_run(run) for run in self._study.runs]
        self._num_finished = sum(found.state is State.FINISHED for found in waiting)
        waiting = [found for found in waiting if found.state is not State.FINISHED]
        outcome, interrupts, passed_on = Outcome(), Interrupts(), 0
        with interrupts.listening():
            while True:
                self._collect(outcome, asked_to_end=interrupts.count > 0)
                if interrupts.count > passed_on:
                    passed_on = interrupts.count
                    self._pass_on()
                if not interrupts.count:
                    self._fill(waiting)
                if not self._running:
                    break
                self._show(self._look(waiting, outcome))
                self._sleep(POLL_S)
        outcome.left = [found.run.name for found in waiting]
        return outcome

    def _fill(self, waiting: list[StudyRun]) -> None:
        while len(self._running) < self._parallel:
            estimates = mean_seconds(self._results.read())
            left_s = None if self._budget_s is None else self._budget_s - (self._now() - self._started_s)
            found = next_run(waiting, estimates, left_s)
            if found is None:
                return
            waiting.remove(found)
            self._say(str(found))
            process = self._start(found, self._study.path / "logs" / f"{found.run.name}.log")
            self._running.append(Running(found=found, process=process, started_s=self._now()))

    def _collect(self, outcome: Outcome, *, asked_to_end: bool) -> None:
        for running in list(self._running):
            code = running.process.poll()
            if code is None:
                continue
            self._running.remove(running)
            code = 128 - code if code < 0 else code
            wall_s = self._now() - running.started_s
            reason = (
                "" if code == 0 else reason_of(running.found.run, self._study.path / "logs" / f"{running.name}.log")
            )
            is_new = running.found.state is State.NEW
            row = self._results.remember(running.found.run, exit_code=code, reason=reason, wall_s=wall_s, is_new=is_new)
            if row["status"] == FINISHED:
                self._num_finished += 1
                tidy(RunDirectory(running.found.run.path))
                self._say(f"{running.name}: finished in {wall_s:.0f} s")
            elif asked_to_end:
                outcome.interrupted.append(running.name)
            else:
                outcome.failed.append(row)
                self._say(f"{running.name}: failed with exit code {code}: {reason}")

    def _pass_on(self) -> None:
        self._say(f"stopping {', '.join(running.name for running in self._running) or 'nothing'} ...")
        for running in self._running:
            running.process.send_signal(signal.SIGINT)

    def _look(self, waiting: Sequence[StudyRun], outcome: Outcome) -> StudyProgress:
        now_s = self._now()
        return StudyProgress(
            num_runs=len(self._study.runs),
            finished=self._num_finished,
            failed=len(outcome.failed),
            waiting=tuple(waiting),
            running=tuple((one.found, one.step(), now_s - one.started_s) for one in self._running),
            estimates=mean_seconds(self._results.read()),
            parallel=self._parallel,
            elapsed_s=now_s - self._started_s,
        )


def make_folder(study: Study) -> None:
    """The study's directory with a copy of its file. Raises: StorageError."""
    with storing(study.path):
        for folder in ("runs", "logs"):
            (study.path / folder).mkdir(parents=True, exist_ok=True)
        replace_file(study.path / "study.toml", study.text.encode())


def start_launcher(found: StudyRun, log_path: Path) -> subprocess.Popen[bytes]:
    """The launcher of one run: on a new directory, or continuing the one that is there."""
    run = found.run
    if found.state is State.NEW:
        # What a kill left between the folder and its configuration holds nothing.
        shutil.rmtree(run.path, ignore_errors=True)
        RunDirectory.create(run.path, dump_toml(run.config))
    command = [sys.executable, "-m", "services.launcher", "train", "--run-dir", str(run.path)]
    with storing(log_path), log_path.open("ab") as log:
        return subprocess.Popen(
            command if found.state is State.NEW else [*command, "--resume"],
            env=os.environ | {"NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Its own session: the terminal's Ctrl-C reaches this process alone, which passes it on.
            start_new_session=True,
            preexec_fn=dying_with_parent(signal.SIGTERM),
        )


def reason_of(run: PlannedRun, log_path: Path) -> str:
    """The last words of a run that did not finish: from run.json, else the last line of its log."""
    message = str(RunDirectory(run.path).read_run().get("message", "")) if run.path.is_dir() else ""
    if message:
        return message.splitlines()[0]
    lines = [
        line.strip() for line in log_path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
    ]
    return lines[-1] if lines else "no output"


def tidy(run: RunDirectory) -> None:
    """Remove what only a continuation or `bapo replay` would need: records, logs, the newest checkpoint and those of
    `checkpoint.keep_best` stay, and models that were exported."""
    for folder in NOT_KEPT:
        shutil.rmtree(run.path / folder, ignore_errors=True)
    config, steps = load_resolved(run.config_path), run.checkpoint_steps()
    found = measured(run.read_evaluations(), config.evaluation.best_measure)
    for step in set(steps[:-1]) - best_steps(found, steps, config.checkpoint.keep_best):
        remove_checkpoint(run.checkpoint_dir(step))


def plan_lines(study: Study, found: Sequence[StudyRun], estimates: Estimates, parallel: int) -> Iterator[str]:
    """What is going to be run: methods, seeds, steps, what there is already, how long it takes."""
    yield f"study {study.path}: {len(found)} runs, {parallel} concurrently"
    for method in dict.fromkeys(one.run.method for one in found):
        own = [one for one in found if one.run.method == method]
        settings = study.file.methods[method]
        states = Counter(one.state for one in own)
        words = ", ".join(f"{states[state]} {WORDS[state]}" for state in State if states[state])
        seeds = " ".join(str(one.run.seed) for one in own)
        each = estimates.by_method.get(method)
        measured = f", {each:.0f} s each (measured)" if each is not None else ""
        yield (
            f"  {method:<20} preset {settings.preset}, seeds {seeds}, {own[0].run.config.run.num_steps} steps: "
            f"{words}{measured}"
        )
        for key in settings.may_differ:
            yield f"  {'':<20} {key} differs from the other methods (may_differ)"
    waiting = [one for one in found if one.state is not State.FINISHED]
    yield f"time for the remaining {len(waiting)}: {remaining(waiting, estimates, parallel)}"


def remaining(waiting: Sequence[StudyRun], estimates: Estimates, parallel: int) -> str:
    if not waiting:
        return "none"
    seconds = rest_s(waiting, (), estimates, parallel)
    return "unknown: no run of this study has finished yet" if seconds is None else f"about {duration(seconds)}"


def progress_line(progress: StudyProgress) -> str:
    running = ", ".join(
        f"{found.run.name} {step}/{found.run.config.run.num_steps}" for found, step, _ in progress.running
    )
    seconds = rest_s(
        progress.waiting,
        [(found, age_s) for found, _, age_s in progress.running],
        progress.estimates,
        progress.parallel,
    )
    failed = f", {progress.failed} failed" if progress.failed else ""
    eta = "ETA unknown yet" if seconds is None else f"ETA {duration(seconds)}"
    return (
        f"{progress.finished}/{progress.num_runs} finished{failed} | {running} | {duration(progress.elapsed_s)} | {eta}"
    )


def end_lines(study: Study, outcome: Outcome, source: str) -> Iterator[str]:
    for row in outcome.failed:
        yield f"{row['run']} failed with exit code {row['exit_code']}: {row['reason']}"
    if outcome.failed:
        yield f"{len(outcome.failed)} of {len(study.runs)} runs failed; their output is in {study.path / 'logs'}"
    if outcome.interrupted:
        yield f"stopped by the user: {', '.join(outcome.interrupted)}"
    if outcome.left:
        yield f"not started: {', '.join(outcome.left)}"
    if outcome.failed or outcome.interrupted or outcome.left:
        yield f"resume with the same command; finished runs are kept: bapo study {source}"
    else:
        yield f"all {len(study.runs)} runs are finished; compare them with: bapo report {study.path}"


WORDS = {
    State.NEW: "to be started",
    State.RESUME: "to be resumed from a checkpoint",
    State.RESTART: "to be restarted",
    State.FINISHED: "finished",
}
