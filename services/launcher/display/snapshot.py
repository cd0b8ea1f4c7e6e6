"""Data of a display, collected from the run directory and two services once per second.

The run directory is authoritative; the services add queues, leases and workers. If a service does not respond, its last
response is kept: a display never fails a run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bapo.config.tree import Config
from bapo.core.errors import AccessError, BapoError
from bapo.runtime.auth.api_tokens import Token
from bapo.runtime.auth.token_store import token_for_run
from bapo.runtime.run_directory.files import Lines
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.rows import EvaluationRow, MetricsRow, last_step, pace_s
from bapo.transport.buffer_admin import BufferAdmin
from bapo.transport.buffer_client import BufferClient, BufferStatus
from bapo.transport.rollout_client import AgentsStatus, FleetStatus, RolloutClient, WorkerStatus
from services.launcher.supervision.children import ProcessLine

log = logging.getLogger(__name__)

SERVICE_EVERY_S = 1.0
SERVICE_TIMEOUT_S = 1.0
READY_TIMEOUT_S = 5.0
"""The buffer service says sooner whether it is Redis that hangs."""

Answer = TypeVar("Answer")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    name: str
    method: str
    """`Config.method`: bapo-reuse."""
    num_steps: int
    batch_size: int
    since: float = 0.0
    """Unix time of this start of the run; a resumed run has older steps."""
    elapsed_s: float = 0.0
    """Seconds since the start, until now or the end of the run."""
    has_ended: bool = False
    processes: Sequence[ProcessLine] = ()
    metrics: Sequence[Row] = ()
    evaluations: Sequence[Row] = ()
    status: BufferStatus | None = None
    silence: str = ""
    """Why the last call of the buffer service failed; `status` is then outdated."""
    is_denied: bool = False
    """Whether it rejected the token."""
    workers: Sequence[WorkerStatus] = ()
    agents: AgentsStatus | None = None
    waits_for_agents: str = ""
    """The command that runs agents, in a run whose agents are all outside."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Event counters of the buffer, such as `failed_groups:verifier_timeout`."""

    @property
    def last_failure(self) -> str:
        """Reason and words of the newest group that failed; empty if none has."""
        return self.status.last_failure if self.status else ""

    @property
    def is_evaluation(self) -> bool:
        """Whether it is a run of `bapo eval`, whose weights are those of no step of its own."""
        names = {process.name for process in self.processes}
        return "evaluator" in names and "scheduler" not in names

    @property
    def step(self) -> int:
        """Last finished step; 0 before the first."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def left_s(self) -> float | None:
        """Remaining seconds at the rate of recent steps, with the final evaluation; None if unknown or finished."""
        if self.has_ended:
            return None
        if (step_s := pace_s(self.metrics, self.since)) is None:
            return None
        base = max((row["seconds"] for row in self.evaluations if row["version"] == 1), default=0.0)
        return float(step_s * (last_step(self.metrics, self.num_steps) - self.step) + base)


class Observer:
    """Keeps a snapshot of one run up to date."""

    def __init__(self, config: Config, run: RunDirectory, token: Token | None = None) -> None:
        """`token`: sent to services; default: as for commands (`token_for_run`)."""
        self._config = config
        self._run = run
        self._token = token
        self._asked_s = float("-inf")
        self._since = 0.0
        self._ended_at: float | None = None
        self._urls: set[str] = set()
        self._buffer: BufferClient | None = None
        self._patient: BufferClient | None = None
        self._admin: BufferAdmin | None = None
        self._fleet: RolloutClient | None = None
        self._status: BufferStatus | None = None
        self._error: BapoError | None = None
        """Error of the last call of the buffer service."""
        self._fleet_status = FleetStatus(workers=[])
        self._counters: Mapping[str, int] = run.read_run().get("counters") or {}
        self._metrics = _Rows(run.path / "metrics.jsonl", MetricsRow)
        self._evaluations = _Rows(run.path / "evaluations.jsonl", EvaluationRow)

    def watch(self, *, buffer_url: str | None = None, rollout_url: str | None = None) -> None:
        """Start polling these services, too. Idempotent."""
        if {buffer_url, rollout_url} <= {None, *self._urls}:
            return
        self._asked_s = float("-inf")
        token = self._token or token_for_run(self._run.path)
        if buffer_url and buffer_url not in self._urls:
            self._buffer = BufferClient(buffer_url, timeout_s=SERVICE_TIMEOUT_S, retry_s=0.0, token=token)
            self._admin = BufferAdmin(buffer_url, timeout_s=SERVICE_TIMEOUT_S, retry_s=0.0, token=token)
            self._patient = BufferClient(buffer_url, timeout_s=READY_TIMEOUT_S, retry_s=0.0, token=token)
        if rollout_url and rollout_url not in self._urls:
            self._fleet = RolloutClient(rollout_url, timeout_s=SERVICE_TIMEOUT_S, retry_s=0.0, token=token)
        self._urls = {url for url in (buffer_url, rollout_url) if url} | self._urls

    def poll(self, processes: Sequence[ProcessLine] = ()) -> Snapshot:
        if time.monotonic() - self._asked_s >= SERVICE_EVERY_S:
            self._asked_s = time.monotonic()
            fields = self._run.read_run()
            self._since, self._ended_at = float(fields.get("started_at") or 0.0), fields.get("ended_at")
            self._status, self._error = _ask(self._buffer.status if self._buffer else None, self._status)
            if self._error is None:
                self._counters, _ = _ask(self._admin.counters if self._admin else None, self._counters)
            self._fleet_status, _ = _ask(self._fleet.status if self._fleet else None, self._fleet_status)
        return Snapshot(
            name=self._run.name,
            method=self._config.method,
            num_steps=self._config.run.num_steps,
            batch_size=self._config.algorithm.batch_size,
            since=self._since,
            elapsed_s=(self._ended_at or time.time()) - self._since if self._since else 0.0,
            has_ended=self._ended_at is not None,
            processes=processes,
            metrics=self._metrics.read(),
            evaluations=self._evaluations.read(),
            status=self._status,
            silence=self._silence,
            is_denied=isinstance(self._error, AccessError),
            workers=tuple(self._fleet_status.workers),
            agents=self._fleet_status.agents,
            waits_for_agents=agent_command(self._config, self._run),
            counters=self._counters,
        )

    @property
    def _silence(self) -> str:
        return str(self._error or "")

    def silence_reason(self) -> str:
        """Why the buffer service does not respond: the Redis status from /readyz, if available."""
        try:
            if self._silence and self._patient is not None:
                self._patient.wait_ready(0.0)
        except BapoError as error:
            return str(error.__cause__ or error)
        return self._silence


def agent_command(config: Config, run: RunDirectory) -> str:
    """What to type for agents of a run whose processes run none; empty for any other run."""
    settings = config.agents
    return f"bapo agent {run.path} -- PROGRAM" if settings is not None and settings.rollout is None else ""


class _Rows:
    """All rows of a growing JSONL file, read incrementally because it is polled every second."""

    def __init__(self, path: Path, kind: type[msgspec.Struct]) -> None:
        self._path, self._kind = path, kind
        self._begin()

    def _begin(self) -> None:
        self._lines, self._rows = Lines(self._path, self._kind), list[Row]()

    def read(self) -> list[Row]:
        if self._lines.is_another_file():  # truncated by a resumed learner
            self._begin()
        self._rows += self._lines.read()
        return self._rows


def _ask(call: Callable[[], Answer] | None, last: Answer) -> tuple[Answer, BapoError | None]:
    """The response, or the previous one and the error."""
    if call is None:
        return last, None
    try:
        return call(), None
    except BapoError as error:
        log.debug("a service did not respond to the display: %s", error)
        return last, error
