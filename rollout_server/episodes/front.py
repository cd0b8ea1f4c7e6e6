"""The front: one thread with an event loop that claims requests for agents, and answers their calls.

    Claims --> Episodes <--routes-- agents
                  |  Recorder --EngineCalls--> workers of the fleet
                  +--complete groups--> Delivery --> buffer

It runs in the process of the rollout server, not in those of the engines: rendering, parsing and HTTP cost a step of no
engine. A second front is a second rollout server.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from socket import socket
from typing import TYPE_CHECKING

import uvicorn

from bapo.config.tree import Config
from bapo.core.errors import BapoError, UnavailableError
from bapo.core.types import RolloutRequest
from bapo.runtime.auth.api_tokens import Keyring
from bapo.tasks.grading.pool import GraderPool
from bapo.tasks.registry import task_of
from bapo.transport.buffer_client import BufferClient
from bapo.transport.http_guard import SERVER_SETTINGS, HttpGuard, Rule
from bapo.transport.rollout_client import AgentsStatus
from rollout_server.claims import Claims
from rollout_server.delivery import NUM_GRADERS, Delivery
from rollout_server.episodes import routes
from rollout_server.episodes.engine_calls import EngineCalls, ReadyWorker
from rollout_server.episodes.gate import Gate, KeyInPath
from rollout_server.episodes.group import rollout_of
from rollout_server.episodes.journal import BufferJournal
from rollout_server.episodes.manager import Episodes, OpenGroup
from rollout_server.episodes.parser_log import quiet_parsers
from rollout_server.episodes.recorder import Recorder
from rollout_server.fleet.metrics import FleetMetrics
from rollout_server.leases import Leases
from rollout_server.worker_report import WorkerCounts

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 << 20
"""Of one call: a long conversation."""
POLL_S = 0.25
"""Between two looks at the versions of the workers."""
SHOW_S = 1.0
FRONT = "agents"
"""In the place of a worker's slot, among the counts of the fleet."""
RETRY_S = 5.0
"""Pause before a claimed request is adopted again, when the buffer does not answer."""
STOP_S = 2.0


class AgentFront:
    """Serves agents from `start` to `stop`."""

    def __init__(
        self,
        config: Config,
        *,
        holder_id: str,
        buffer_url: str,
        ready: Callable[[], list[ReadyWorker]],
        listener: socket,
        base_url: str,
        keyring: Keyring | None,
        metrics: FleetMetrics,
        on_death: Callable[[BaseException], None],
    ) -> None:
        """
        Args:
            holder_id: in whose name requests are claimed.
            ready: the workers of the fleet that may be called.
            base_url: of the model's routes, as agents reach it.
            on_death: called with an error after which nothing is served.
        """
        assert config.agents is not None
        self._config, self._ready, self._listener, self._base_url = config, ready, listener, base_url
        self._keyring, self._metrics, self._on_death = keyring, metrics, on_death
        self._buffer = BufferClient(buffer_url)
        self._leases, self.counts = Leases(), WorkerCounts()
        self._grader = GraderPool(config.task, num_children=NUM_GRADERS)
        self._delivery = Delivery(
            worker_id=holder_id,
            buffer=self._buffer,
            grader=self._grader,
            leases=self._leases,
            counts=self.counts,
            num_graders=NUM_GRADERS,
            on_death=on_death,
            on_end=lambda _: None,
        )
        self._claims = Claims(
            holder_id,
            self._buffer,
            self._leases,
            limit=lambda: config.rollout.max_groups_in_flight * max(1, len(ready())),
            lease_s=config.buffer.lease_s,
            on_request=lambda request: self._soon(self._adopt, request),
            on_lost=lambda request_id: self._soon(self._lose, request_id),
            on_death=on_death,
        )
        self._episodes = Episodes(
            config.agents,
            BufferJournal(holder_id, self._buffer),
            deliver=self._deliver,
            refuse=self._refuse,
            lost=lambda request: self._leases.remove(request.request_id),
            count=lambda name: self.counts.add(f"episodes/{name}"),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)

    def start(self) -> None:
        """Start the thread; agents are answered as soon as the tokenizer is loaded."""
        self._thread.start()

    def status(self) -> AgentsStatus:
        """What is shown of its episodes."""
        episodes = self._episodes
        return AgentsStatus(
            base_url=self._base_url,
            num_open=episodes.num_open,
            num_waiting=episodes.num_waiting,
            failed=dict(episodes.num_failed),
            last_failure=episodes.last_failure,
        )

    def stop(self) -> None:
        """Claim and answer nothing more; leases return to the queue, and journals stay with them."""
        self._claims.stop(STOP_S)
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(STOP_S)
        self._delivery.stop(STOP_S)
        self._grader.close()
        self._claims.release()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BapoError as error:
            self._on_death(error)
        except Exception as error:  # a bug must end the process, which agents would call in vain
            log.exception("the front of the agents ended")
            self._on_death(error)

    async def _main(self) -> None:
        from rollout_server.episodes.vllm_serving import Client, make_app  # here: takes ten seconds

        self._loop = asyncio.get_running_loop()
        client = Client(self._config)  # type: ignore[abstract]  # what is not for agents refuses
        engines = EngineCalls(self._ready)
        tokenizer = client.tokenizer
        recorder = Recorder(
            self._config,
            self._episodes,
            engines,
            encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
            decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
            took=lambda phase, seconds: self.counts.observe("bapo_episode_call_seconds", phase, [seconds]),
        )
        client.sample = recorder.sample
        self._decode = lambda many: list(tokenizer.batch_decode(many, skip_special_tokens=True))
        app = await make_app(self._config, client, task_of(self._config).chat_variables())
        quiet_parsers(lambda: self.counts.add("episodes/malformed"))
        guard(
            app, self._episodes, self._config,
            base_url=self._base_url, keyring=self._keyring, begin=tokenizer.bos_token,
        )  # fmt: skip
        self._server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=1, **SERVER_SETTINGS))
        self._delivery.start()
        loops = (self._follow_versions(), self._episodes.watch(), self._show())
        background = [asyncio.create_task(loop) for loop in loops]
        log.info("agents may call %s", self._base_url)
        await self._server.serve(sockets=[self._listener])
        for task in (*background, *self._tasks):
            task.cancel()
        engines.close()

    async def _follow_versions(self) -> None:
        """Claim what the slowest ready worker may sample; nothing before there is one."""
        known: int | None = None
        while True:
            version = min((worker.policy_version for worker in self._ready()), default=None)
            if version is not None and version != known:
                if known is None:
                    self._claims.start(version)
                await asyncio.to_thread(self._claims.claim_for, version)
                known = version
            await asyncio.sleep(POLL_S)

    async def _show(self) -> None:
        """Metrics, once a second."""
        while True:
            episodes = self._episodes
            self._metrics.count(FRONT, self.counts.snapshot())
            self._metrics.agents(
                num_open=episodes.num_open, num_waiting=episodes.num_waiting, oldest_s=episodes.oldest_s
            )
            await asyncio.sleep(SHOW_S)

    def _soon(self, function: Callable[[RolloutRequest], None] | Callable[[str], None], argument: object) -> None:
        """In the event loop."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)  # type: ignore[arg-type]

    def _adopt(self, request: RolloutRequest) -> None:
        task = asyncio.get_running_loop().create_task(self._adopt_until_done(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _adopt_until_done(self, request: RolloutRequest) -> None:
        while request.request_id in self._leases.held():
            try:
                await self._episodes.adopt(request)
            except UnavailableError as error:
                log.warning("request %s is not offered to agents yet: %s", request.request_id, error)
                await asyncio.sleep(RETRY_S)
            else:
                return

    def _lose(self, request_id: str) -> None:
        self._episodes.lose(request_id)
        self.counts.add("failed/lease_lost")

    def _deliver(self, group: OpenGroup) -> None:
        lease = self._leases.sampled(group.request.request_id)
        if lease is not None:
            self._delivery.add(rollout_of(group.request, list(group.episodes.values()), self._decode), lease)

    def _refuse(self, request: RolloutRequest, reason: str, detail: str) -> None:
        self._delivery.refuse_async(request.request_id, reason, detail)


def guard(
    app: FastAPI, episodes: Episodes, config: Config, *, base_url: str, keyring: Keyring | None, begin: str | None
) -> None:
    """Make vLLM's app the agents' address: its routes are open to whoever has the key of an episode, ours to tokens.

    Args:
        begin: the tokenizer's BOS token, if it has one.
    """
    settings = config.agents
    assert settings is not None
    for route in app.router.routes:
        if (endpoint := getattr(route, "endpoint", None)) is not None:
            endpoint.rule = Rule(is_open=True, most_bytes=MAX_BODY_BYTES)
    routes.attach(app, episodes, base_url=base_url, with_answers=settings.with_answers)
    app.add_middleware(
        Gate,
        prompt_of=episodes.prompt_of,
        keyring=keyring,
        model_name=settings.model_name,
        longest=config.rollout.longest_sequence,
        begin=begin,
    )
    app.add_middleware(HttpGuard, routes=app.router.routes, keyring=keyring, refused=lambda reason: None)
    app.add_middleware(KeyInPath)
