"""Runs from Python: `bapo.train` starts the launcher as `bapo train` does, `Run` follows and ends it.

    with bapo.train("run.toml", reward=score, learner={"lr": 1e-5}) as run:
        for row in run:
            print(row["step"], row["reward_mean"])

A run is stopped by Ctrl-C while this process waits for it, by the end of a `with` block, and by the end of this process
if its main thread started it; `bapo train --resume RUN` continues it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from bapo.cli.arguments import AUTO, free_name
from bapo.cli.running.runs import state_of
from bapo.cli.training.start import create_run, refuse_unnamed_layers, warn_of_unused
from bapo.config.check import listening_sections
from bapo.config.layers import Layer, file_layer
from bapo.config.load import load_layers
from bapo.core.errors import BapoError, ConfigError, DeadlineError
from bapo.function_file import Rewards, named
from bapo.runtime.process import dying_with_parent
from bapo.runtime.run_directory.files import Lines, storing
from bapo.runtime.run_directory.layout import UNDER_WAY, RunDirectory
from bapo.runtime.run_directory.rows import MetricsRow

POLL_S = 0.2
RECORDS_POLL_S = 2.0
STOP_S = 120.0
INTERRUPTED = 130
REWARD_FILE = "reward.py"
"""In the run directory: the reward functions of a notebook or script."""
Source = str | Path | Mapping[str, Any]
"""A TOML file, a preset, or a config as a map of sections."""


def train(config: Source | Sequence[Source] = (), *, reward: Rewards | None = None, **sections: Any) -> Run:
    """Start a run, and return once its checks have passed.

    Args:
        config: as of `bapo train`; of several the later takes precedence.
        reward: as `task.reward`, one or a list, with functions in the place of names.
        sections: settings above `config`, such as `learner={"lr": 1e-5}`.
    Its name is the next free one, and its ports are free ones, unless they are set.
    Raises: ConfigError and other errors of the checks.
    """
    sources = [config] if isinstance(config, str | Path | Mapping) else list(config)
    given = [
        Layer(source="the config", values=each) if isinstance(each, Mapping) else file_layer(each) for each in sources
    ]
    given.append(Layer(source="bapo.train", values=sections))
    free = listening_sections(with_agents=any("agents" in layer.values for layer in given))
    defaults: dict[str, Any] = {"run": {"name": AUTO}, **{section: {"port": 0} for section in free}}
    layers = [Layer(source="bapo.train", values=defaults), *given]
    refuse_unnamed_layers(layers, "bapo.train(model={'path': ...}, task={'name': ...})")
    resolved = load_layers(layers).run
    path = Path(resolved.root, resolved.name)
    if resolved.name == AUTO:
        files = [each for each in sources if not isinstance(each, Mapping)]
        path = path.with_name(free_name(path.parent, Path(files[-1]).stem if files else "run"))
    last: dict[str, Any] = {"run": {"name": path.name}}
    file, text = path.absolute() / REWARD_FILE, ""
    if reward is not None:
        names, text = named(reward, file)
        last["task"] = {"reward": names}
    config_of_run = load_layers([*layers, Layer(source="bapo.train", values=last)])
    warn_of_unused(config_of_run, given)
    run = create_run(config_of_run)
    if text:
        with storing(file):
            file.write_text(text, encoding="utf-8")
    return Run(run.path, _start(run))


class Run:
    """A run: of `train`, or an earlier one by its directory, `Run("outputs/run-001")`."""

    def __init__(self, path: str | Path, launcher: Launcher | None = None) -> None:
        """Raises: ConfigError if it is not a run directory."""
        self._run = RunDirectory.open(path)
        self._launcher = launcher

    def __repr__(self) -> str:
        rows = self.metrics
        return f"Run({str(self.path)!r}, {self.status}, step {rows[-1]['step'] if rows else 0})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The metrics of each step, as soon as it is trained, until the run ends. Ctrl-C stops the run.

        Raises: as `wait`.
        """
        last = 0
        lines = Lines(self.path / "metrics.jsonl", MetricsRow)
        with self._stopped_by_interrupt():
            while True:
                has_ended = not self.is_running  # before the rows: what was written until then is read
                if lines.is_another_file():  # the learner has resumed from its checkpoint
                    lines = Lines(self.path / "metrics.jsonl", MetricsRow)
                for row in lines.read():
                    if row["step"] > last:
                        last = row["step"]
                        yield row
                if has_ended:
                    break
                self._pause()
        self.wait()

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._run.path

    @property
    def status(self) -> str:
        """Of run.json: starting, running, finished, interrupted or failed, also of a launcher that was killed; created
        before the first start. Of a run without a launcher, as in containers: created, running, stopped or finished,
        by its records."""
        return self._run.status or state_of(self._run).state

    @property
    def is_running(self) -> bool:
        return self._launcher.process.poll() is None if self._launcher else self.status in UNDER_WAY

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row per step so far."""
        return self._run.read_metrics()

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """One row per held-out split and measured weights so far."""
        return self._run.read_evaluations()

    def wait(self) -> str:
        """Until the run has ended; its status, such as "finished" or "interrupted". Ctrl-C stops the run.

        Raises: ConfigError or BapoError with the launcher's message if the run has failed, also of a run that was
            started elsewhere.
        """
        with self._stopped_by_interrupt():
            while self.is_running:
                self._pause()
        if self._launcher:
            self._launcher.check(self.path)
        elif self.status == "failed":
            raise _recorded_failure(self._run)
        return self.status

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Stop it like Ctrl-C in the terminal of `bapo train`; nothing if it has ended.

        Raises: ConfigError for a run that another process has started; DeadlineError.
        """
        if not self.is_running:
            return
        if self._launcher is None:
            raise ConfigError(f"another process has started {self.path}: bapo stop {self.path}")
        self._launcher.process.send_signal(signal.SIGTERM)
        try:
            self._launcher.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(
                f"{self.path} has not stopped within {timeout_s:.0f} s: bapo stop {self.path}"
            ) from error

    def export(self, path: str | Path | None = None, *, step: int | None = None, best: bool = False) -> Path:
        """The model of a checkpoint in Hugging Face format, as `bapo export` writes it; its folder.

        Args:
            path: folder to create; None: in the checkpoint. step: None: the latest. best: that which measured best.
        Raises: BapoError with the reason.
        """
        flags = ["--out", str(path)] if path else []
        flags += ["--step", str(step)] if step is not None else []
        flags += ["--best"] if best else []
        command = [sys.executable, "-m", "bapo.cli", "export", str(self.path), *flags]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise BapoError(done.stderr.strip().removeprefix("error: "))
        return Path(done.stdout.splitlines()[-1])

    def _pause(self) -> None:
        """Between two looks; that at a run without a launcher reads all its records."""
        time.sleep(POLL_S if self._launcher or self._run.status else RECORDS_POLL_S)

    @contextmanager
    def _stopped_by_interrupt(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            if self._launcher:
                self.stop()
            raise


@dataclass(frozen=True, slots=True)
class Launcher:
    """The process of `bapo train`, and what it prints."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]

    @property
    def said(self) -> str:
        """All that it has printed so far."""
        # Not read(), which would move the place where the launcher writes.
        return os.pread(self.output.fileno(), os.fstat(self.output.fileno()).st_size, 0).decode(errors="replace")

    def check(self, path: Path) -> None:
        """Raises: ConfigError for exit code 2, BapoError for another that is neither 0 nor that of a stop."""
        code = self.process.returncode
        if code in (0, INTERRUPTED):
            return
        raise _failure(path, code, self.said)


def _failure(path: Path, code: int, text: str) -> BapoError:
    kind = ConfigError if code == ConfigError.exit_code else BapoError
    return kind(f"run {path} has failed with exit code {code}:\n{text.strip().removeprefix('error: ')}")


def _recorded_failure(run: RunDirectory) -> BapoError:
    """As run.json has it; a launcher that was killed left no reason there."""
    fields = run.read_run()
    if fields.get("status") in UNDER_WAY:
        pid = fields.get("pid")
        return BapoError(f"run {run.path} has failed: its launcher (pid {pid}) was killed; see bapo status {run.path}")
    code = fields.get("exit_code")
    return _failure(
        run.path, code if isinstance(code, int) else BapoError.exit_code, str(fields.get("message") or "no reason")
    )


def _start(run: RunDirectory) -> Launcher:
    """Start its launcher and wait for the checks. Raises: as `Launcher.check`."""
    output = (run.path / "logs" / "launcher.log").open("w+b")  # stays open when a refused start deletes the directory
    is_main = threading.current_thread() is threading.main_thread()
    process = subprocess.Popen(
        [sys.executable, "-m", "services.launcher", "train", "--run-dir", str(run.path)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for this process, which stops it once
        # The kernel signals a child when the thread ends that started it.
        preexec_fn=dying_with_parent(signal.SIGTERM) if is_main else None,
    )
    launcher = Launcher(process, output)
    try:
        while process.poll() is None and not run.read_run():
            time.sleep(POLL_S)
    except BaseException:  # Ctrl-C during the checks, whose processes end with the launcher
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        process.kill()
        raise
    if process.returncode is not None:
        launcher.check(run.path)
    for line in launcher.said.splitlines():
        if line.startswith("warning: "):  # of the checks; later lines are progress
            print(line, file=sys.stderr)  # noqa: T201
    return launcher
