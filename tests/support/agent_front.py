"""A worker with a real engine, the front of the agents, and a buffer in memory: everything in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bapo.config.tree import Config
from bapo.core.types import RolloutRequest, WeightUpdate
from bapo.runtime.metrics.metric import Process
from bapo.runtime.metrics.server import Telemetry
from bapo.transport.episode_client import EpisodeClient, OpenedEpisode
from bapo.transport.listen import listen
from rollout_server.episodes import front as front_module
from rollout_server.episodes.engine_calls import ReadyWorker
from rollout_server.episodes.front import AgentFront
from rollout_server.fleet.metrics import FleetMetrics
from rollout_server.fleet.worker_handle import LocalHandle
from rollout_server.worker import Worker
from tests.support.rollout import InstantGrader, MemoryBuffer
from tests.support.wait import wait_until

LOOKUP = "models/lookup-tiny"


def agents_config(model: str | Path = LOOKUP, **agents: Any) -> Config:
    """A config for the shipped model of agents."""
    return Config.model_validate(
        {
            "model": {"path": str(model)},
            "task": {"name": "lookup"},
            "agents": {"port": 0, **agents},
            "learner": {"microbatch_tokens": 4096},
            "rollout": {"max_prompt_tokens": 160, "max_response_tokens": 96, "max_groups_in_flight": 8},
        }
    )


class JournalBuffer(MemoryBuffer):
    """A buffer in memory that has journals, too."""

    def __init__(self, requests: Sequence[RolloutRequest] = ()) -> None:
        super().__init__(requests)
        self.journals: dict[str, list[bytes]] = {}

    def read_journal(self, request_id: str) -> list[bytes]:
        return list(self.journals.get(request_id, []))

    def append_journal(self, worker_id: str, request_id: str, first: int, entries: Sequence[bytes]) -> tuple[str, int]:
        self._check_up()
        if self.leased.get(request_id) != worker_id:
            return "not_held", 0
        found = self.journals.setdefault(request_id, [])
        if len(found) != first:
            return "gap", len(found)
        found += entries
        return "ok", len(found)


@dataclass
class Stage:
    """What a test drives."""

    buffer: JournalBuffer
    worker: Worker
    front: AgentFront
    url: str
    deaths: list[BaseException]
    version: int = 1

    @property
    def client(self) -> EpisodeClient:
        return EpisodeClient(self.url, retry_s=5.0)

    def open(self, count: int) -> list[OpenedEpisode]:
        """Exactly so many episodes."""
        found: list[OpenedEpisode] = []
        while len(found) < count:
            found += self.client.open(count - len(found), wait_s=10.0)
        return found

    def publish(self, update: WeightUpdate) -> None:
        self.worker.update_weights(update)
        self.version = update.version


@contextmanager
def staged(config: Config, requests: Sequence[RolloutRequest], patch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """Everything up, until the block ends."""
    from rollout_server.engines import vllm

    os.environ.update(vllm.ENVIRONMENT)
    buffer: Any = JournalBuffer(requests)
    grader: Any = InstantGrader()
    worker = Worker(
        worker_id="worker-0",
        config=config,
        buffer=buffer,
        make_engine=lambda config: vllm.make_engine(config, "worker-0"),
        make_tokenization=vllm.make_tokenization,
        make_grader=lambda config: grader,
    )
    worker.load()
    worker.begin(None)
    patch.setattr(front_module, "BufferClient", lambda url: buffer)
    patch.setattr(front_module, "GraderPool", lambda *args, **options: grader)
    listener, deaths = listen("127.0.0.1", 0, what="agents", key="agents.port"), list[BaseException]()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    stage = Stage(buffer=buffer, worker=worker, front=None, url=url, deaths=deaths)  # type: ignore[arg-type]
    stage.front = AgentFront(
        config,
        holder_id="agents",
        buffer_url="",
        ready=lambda: [ReadyWorker("worker-0", stage.version, LocalHandle(worker))],
        listener=listener,
        base_url=f"{url}/v1",
        keyring=None,
        metrics=FleetMetrics(Telemetry(Process.ROLLOUT_SERVER, run="test"), "lookup"),
        on_death=deaths.append,
    )
    stage.front.start()
    try:
        yield stage
    finally:
        stage.front.stop()
        worker.stop()
        assert deaths == []


def wait_for_groups(stage: Stage, count: int) -> None:
    """Until the buffer has so many groups."""
    wait_until(lambda: len(stage.buffer.groups) >= count, timeout_s=60.0)
