"""A rollout worker that does what a test says."""

from __future__ import annotations

from collections.abc import Callable

from bapo.core.types import WeightUpdate
from rollout_server.fleet.worker_handle import WorkerDiedError
from rollout_server.worker_report import WorkerReport


class FakeHandle:
    """A worker that does what the test says. `events` is what happened to it, in order."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.events: list[str] = []
        self.state = "loaded"
        self.error = ""
        self.message = ""
        self.stored = 0
        self.dead = False
        self.refuses: Exception | None = None
        self.version = 1
        self.tail = ""
        self.is_immortal = False
        self.stuck_s = 0.0
        self.on_update: Callable[[WeightUpdate], None] = lambda _: None

    def start(self) -> None:
        self.events.append("start")

    def report(self, timeout_s: float) -> WorkerReport:
        if self.dead:
            raise WorkerDiedError("its process is gone")
        return WorkerReport(
            state=self.state,
            policy_version=self.version,
            inflight=0,
            tokens_per_s=0.0,
            pid=1,
            rss_bytes=1,
            stuck_s=self.stuck_s,
            counts={"groups/fresh/stored": self.stored},
            error=self.error,
            message=self.message,
        )

    def begin(self, update: WeightUpdate | None, timeout_s: float) -> None:
        self.events.append(f"begin {update.version if update else None}")
        if self.refuses:
            raise self.refuses
        self.version = update.version if update else 1
        self.state = "sampling"

    def update_weights(self, update: WeightUpdate, timeout_s: float) -> float:
        self.events.append(f"update {update.version}")
        self.on_update(update)
        if self.refuses:
            raise self.refuses
        self.version = update.version
        return 0.5

    def drain(self, timeout_s: float) -> None:
        self.events.append("drain")

    def kill(self) -> None:
        self.events.append("kill")
        if self.is_immortal:
            raise RuntimeError("Ray does not answer")

    def log_tail(self) -> str:
        return self.tail
