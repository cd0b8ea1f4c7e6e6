"""Displays of a run: a live table in a terminal, else plain lines (one per step, process and evaluation)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live

from bapo.config.tree import Config
from bapo.core.correctness import ACCURACY, measure_of
from bapo.core.text import ORIGINS, count, duration, num_groups, percent, plain, staleness
from bapo.runtime.logs import LogFollower
from bapo.runtime.process import Interrupts
from bapo.runtime.run_directory.layout import UNDER_WAY, RunDirectory
from services.launcher.display.snapshot import Observer, Snapshot
from services.launcher.display.summary import losses
from services.launcher.display.table import render
from services.launcher.supervision.children import ProcessLine


class Display(Protocol):
    def show(self, snapshot: Snapshot) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None:
        """Restore the terminal; the last table stays."""
        ...


def make_display(console: Console) -> Display:
    return LiveDisplay(console) if console.is_terminal and not console.is_dumb_terminal else LineDisplay(console)


class LiveDisplay:
    def __init__(self, console: Console) -> None:
        self._console = console
        # No refresh thread, so that forking in the launcher is safe.
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="visible")
        self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        """Redraw at the current terminal size."""
        self._live.update(render(snapshot, *self._console.size), refresh=True)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()


class LineDisplay:
    """One line per event, for files, pipes and CI."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._states: dict[str, str] = {}
        self._step = 0
        self._num_evaluations: int | None = None
        self._is_warned = False
        self._losses: set[str] = set()
        self._waiting: set[str] = set()
        """Workers whose groups wait for something outside of the run."""

    def show(self, snapshot: Snapshot) -> None:
        for line in self._news(snapshot):
            self.say(line)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing to restore."""

    def _news(self, snapshot: Snapshot) -> Iterator[str]:
        for process in snapshot.processes:
            if self._states.get(process.name) != process.state:
                self._states[process.name] = process.state
                yield process_line(process)
        if self._num_evaluations is None:
            # Resumed run: printed by an earlier start.
            self._num_evaluations = len(snapshot.evaluations) if snapshot.metrics else 0
            self._step = snapshot.step
        for what, lost in losses(snapshot.counters, snapshot.metrics, snapshot.last_failure):
            if what not in self._losses:  # later ones are in the summary
                self._losses.add(what)
                yield f"{what}: {lost}"
        waiting = {worker.worker_id: worker.waiting_for for worker in snapshot.workers if worker.waiting_for}
        yield from (f"{name}: {words}" for name, words in waiting.items() if name not in self._waiting)
        self._waiting = {*waiting}
        for row in snapshot.evaluations[self._num_evaluations :]:
            measure = measure_of(snapshot.evaluations, row["split"])
            yield evaluation_line(row, measure, has_step=not snapshot.is_evaluation)
        self._num_evaluations = len(snapshot.evaluations)
        for row in snapshot.metrics:
            if row["step"] > self._step:
                yield step_line(row, snapshot)
                yield from self._warning(row)
        self._step = snapshot.step

    def _warning(self, row: Mapping[str, Any]) -> Iterator[str]:
        text = row.get("warning")
        if text and not self._is_warned:
            yield f"warning at step {row['step']}: {text}"
        self._is_warned = bool(text)


def process_line(process: ProcessLine) -> str:
    """`rollout_server is starting: vLLM engine loading, takes about 30-60 s on a CPU`."""
    if process.state == "starting":
        return f"{process.name} is starting" + (f": {process.hint}" if process.hint else "")
    if process.state == "ready":
        return f"{process.name} is ready after {process.seconds:.1f} s"
    return f"{process.name} has exited"


class QuietDisplay:
    """Shows nothing during the run; the launcher prints the result."""

    def show(self, snapshot: Snapshot) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class VerboseDisplay(LineDisplay):
    """One line per event, and every log line, prefixed with its process."""

    def __init__(self, console: Console, run: RunDirectory) -> None:
        super().__init__(console)
        self._logs = LogFollower(run.logs_path)
        for part in self._logs.parts():
            self._logs.latest(part, 0)  # skip lines of an earlier start

    def show(self, snapshot: Snapshot) -> None:
        """Print new events, then new log lines."""
        super().show(snapshot)
        for part, line in self._logs.new_lines():
            self.say(f"[{part}] {plain(line)}")


def step_line(row: Mapping[str, Any], snapshot: Snapshot) -> str:
    parts = " ".join(f"{origin}={row[origin]}" for origin in ORIGINS)
    ages = ((origin, staleness(row, origin)) for origin in ORIGINS)
    stale = " ".join(f"staleness_{origin}={age}" for origin, age in ages if age is not None)
    left = f" left={duration(snapshot.left_s).replace(' ', '')}" if snapshot.left_s is not None else ""
    return (
        f"step {row['step']}/{snapshot.num_steps} reward={row['reward_mean']:.3f} {parts} "
        f"groups={num_groups(row)}/{snapshot.batch_size} bad={row['num_bad']} high={row['num_high']} "
        f"{stale} tokens_per_s={count(row['tokens_per_s'])} "
        f"step_s={row['step_s']:.2f} wait_batch_s={row['wait_batch_s']:.2f}{left}"
    )


def evaluation_line(row: Mapping[str, Any], measure: str, *, has_step: bool = True) -> str:
    """`held-out cd34 at step 50: 41.6 % [38.0 %, 45.2 %] of 200 prompts`; of `bapo eval` `held-out cd34: avg@2 41.6 %`.

    Args:
        measure: what the number is (`measure_of`); left out for an accuracy.
        has_step: whether the weights are those of a step of this run.
    """
    named = "" if measure == ACCURACY else f"{measure} "
    at, average = (f" at step {row['step']}", "") if has_step else ("", f"avg@{row['num_samples']} ")
    return (
        f"held-out {row['split']}{at}: {named}{average}{percent(row['accuracy'])} "
        f"[{percent(row['low'])}, {percent(row['high'])}] of {row['num_prompts']} prompts"
    )


TICK_S = 1.0


def watch(config: Config, run: RunDirectory, console: Console) -> int:
    """Show the run until it ends or the user presses Ctrl-C."""
    interrupts = Interrupts()
    interrupts.install()
    observer, display = Observer(config, run), make_display(console)
    try:
        while not interrupts.asked:
            fields = run.read_run()
            addresses = fields.get("addresses") or {}
            observer.watch(buffer_url=addresses.get("buffer_url"), rollout_url=addresses.get("rollout_url"))
            display.show(observer.poll())
            if not run.is_under_way:
                break
            time.sleep(TICK_S)
    finally:
        display.close()
    if not interrupts.asked:
        display.say(_final_state(run))
    return 0


def _final_state(run: RunDirectory) -> str:
    fields = run.read_run()
    status = fields.get("status", "not started yet")
    if status in UNDER_WAY:
        status = f"crashed: its launcher (pid {fields.get('pid')}) is no longer running"
    message = f": {fields['message']}" if fields.get("message") else ""
    return f"{run.name}: {status}{message}"
