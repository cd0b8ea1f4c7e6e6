"""`python -m rollout_server --config RUN/config.toml --run-dir RUN [--buffer-url URL] [--host HOST] [--port PORT]`.

Examples:
    python -m rollout_server --config outputs/demo/config.toml --run-dir outputs/demo
    python -m rollout_server --config RUN/config.toml --run-dir RUN --buffer-url http://127.0.0.1:8700 --port 0
    RAY_ADDRESS=10.0.0.1:6379 python -m rollout_server --config RUN/config.toml --run-dir RUN
    python -m rollout_server --config RUN/config.toml --run-dir RUN --host 0.0.0.0 --one-of-several    # in containers

The OpenAPI docs of the control API are at /docs; its port is written to RUN/ports/rollout_server. Each worker of a real
engine is a Ray actor that logs to RUN/logs/<worker>.log. SIGTERM stops everything within seconds and releases leases.
"""

from __future__ import annotations

import argparse
import logging
import re
import socket
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from urllib.parse import urlsplit

import uvicorn

from bapo.config.tree import Config
from bapo.core.addresses import authority, http_url, is_wildcard, reachable
from bapo.core.errors import BapoError, ConfigError, UnavailableError
from bapo.core.types import WeightUpdate
from bapo.runtime.auth.api_tokens import Keyring, keyring_for, listen_host
from bapo.runtime.metrics.metric import Process
from bapo.runtime.metrics.server import Telemetry
from bapo.runtime.process import Flags, run_process
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.buffer_client import BufferClient
from bapo.transport.endpoints import AGENTS, ROLLOUT_SERVER, buffer_url
from bapo.transport.http_guard import SERVER_SETTINGS
from bapo.transport.listen import listen
from rollout_server.api import create_app
from rollout_server.autoscaling.autoscaler import Autoscaler
from rollout_server.engines.base import engine_module
from rollout_server.episodes.engine_calls import ReadyWorker
from rollout_server.episodes.front import AgentFront
from rollout_server.fleet import ray_environment
from rollout_server.fleet.fleet import Fleet
from rollout_server.fleet.target import recall_target, remember_target
from rollout_server.fleet.worker_handle import LocalHandle, WorkerHandle, make_worker
from rollout_server.weights.newest import Follower, recall, remember
from rollout_server.weights.relay import WeightRelay

log = logging.getLogger(__name__)

RELEASE_S = 2.0
"""Longest time to release the leases of a dead worker: the buffer may stop at the same time."""
AUTOSCALER_TIMEOUT_S = 5.0
"""Request timeout of the autoscaler, which polls again, and must not delay shutdown."""
SHUTDOWN_S = 1
LONGEST_HOST = 100
"""Characters of the host in a worker's id; the buffer accepts ids of up to 128."""
NODE_S = 10.0
"""Longest time for the Ray node to stop; one that is still starting must start first."""


class Server(uvicorn.Server):
    """Stops at the first signal, immediately at the second. uvicorn would re-raise the signal."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT."""
        self.force_exit = self.should_exit
        self.should_exit = True


def main(flags: Flags) -> None:
    """Serve until SIGTERM. Raises: ConfigError before anything is started; the fatal error of the fleet."""
    config = flags.config
    telemetry = Telemetry(Process.ROLLOUT_SERVER, run=config.run.name)
    engine_module(config.rollout.engine).check(config)
    if flags.extra.one_of_several and config.autoscaling.actuator == "fleet":
        raise ConfigError(
            "autoscaling.actuator = fleet scales the workers of a single rollout server, but this is one of several; "
            "set it to external, and scale the servers by bapo_rollout_desired_workers"
        )
    port = config.rollout.port if flags.extra.port is None else flags.extra.port
    host = listen_host(flags.extra.host, config.rollout.host)
    keyring = keyring_for("the rollout server", host, config.security.tokens)
    listener = listen(host, port, what="the rollout server", key="rollout.port")
    url = flags.extra.buffer_url or buffer_url(config, flags.run)
    runner = Runner(
        config,
        flags.run,
        url,
        telemetry,
        own_url=http_url(host, listener.getsockname()[1]),
        buffer_host="" if flags.extra.buffer_url or config.buffer.url else config.buffer.host,
        one_of_several=flags.extra.one_of_several,
    )
    app = create_app(
        runner.fleet, telemetry, keyring, scale=runner.scale, store=runner.store, images=flags.run.images,
        refusal=lambda: runner.autoscaler.refusal,
        agents=lambda: runner.front.status() if runner.front is not None else None,
    )  # fmt: skip
    server = Server(uvicorn.Config(app, timeout_graceful_shutdown=SHUTDOWN_S, **SERVER_SETTINGS))
    runner.start(on_end=lambda: setattr(server, "should_exit", True))
    if config.agents is not None:
        agents_host = listen_host(None, config.agents.host)
        runner.serve_agents(agents_host, keyring_for("the address of the agents", agents_host, config.security.tokens))
    flags.run.write_port(ROLLOUT_SERVER, int(listener.getsockname()[1]))
    log.info("run=%s listening on %s, buffer=%s", config.run.name, authority(*listener.getsockname()[:2]), url)
    try:
        server.run(sockets=[listener])
    finally:
        runner.stop()
    if runner.fleet.fatal is not None:
        raise runner.fleet.fatal


def reached_at(url: str, address: str, host: str = "") -> str:
    """The URL, with this address in place of a wildcard, for callers on other hosts.

    Args:
        host: where the service listens, if the URL is for callers on this host.
    """
    parts = urlsplit(url)
    return http_url(address, parts.port or 80) if is_wildcard(host or parts.hostname or "") else url


def _reached_by_agents(host: str) -> str:
    """The host in the `base_url` of an episode: of several servers the one that has the episode."""
    if not is_wildcard(host):
        return reachable(host)
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:  # a host that cannot resolve its own name
        return reachable(host)


class Runner:
    """Starts and stops the fleet; the API is available from the start."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        url: str,
        telemetry: Telemetry,
        *,
        own_url: str = "",
        buffer_host: str = "",
        one_of_several: bool = False,
    ) -> None:
        """
        Args:
            own_url: for workers on other hosts, which fetch weights from it.
            buffer_host: where the buffer service of this host listens; empty if its URL was given.
        """
        self._config, self._run, self._url = config, run, url
        self._worker_url, self._buffer_host = url, buffer_host
        self._telemetry = telemetry
        self.store = WeightRelay(run.weights_path, lambda: self.own_url)
        self.own_url = own_url
        self._in_process = engine_module(config.rollout.engine).IN_PROCESS
        self._has_node = threading.Event()
        self._ended = threading.Event()
        self._on_end: Callable[[], None] = lambda: None
        self.fleet = Fleet(
            config,
            make_handle=self._make_handle,
            release=BufferClient(url, timeout_s=RELEASE_S, retry_s=RELEASE_S).release,
            telemetry=telemetry,
            on_fatal=lambda _: self._on_end(),
            remember=lambda update: remember(run.weights_path, update),
            locate=self.store.locate,
            prefix=f"{socket.gethostname()[:LONGEST_HOST]}-" if one_of_several else "",
        )
        follower = Follower(run.weights_path, BufferClient(url, retry_s=RELEASE_S), self.fleet.follow)
        self._follower = follower if one_of_several else None
        self.autoscaler = self._make_autoscaler(room=None)
        self._thread = threading.Thread(target=self._live, name="node", daemon=True)
        self.front: AgentFront | None = None

    def serve_agents(self, host: str, keyring: Keyring | None) -> None:
        """Let agents call, if the run has any."""
        settings = self._config.agents
        if settings is None:
            return
        listener = self._listen_to_agents(host, settings.port)
        port = int(listener.getsockname()[1])
        self.front = AgentFront(
            self._config,
            holder_id=f"{self.fleet.prefix}{AGENTS}",
            buffer_url=self._url,
            ready=lambda: [ReadyWorker(*found) for found in self.fleet.ready_workers()],
            listener=listener,
            base_url=(settings.url or http_url(_reached_by_agents(host), port)) + "/v1",
            keyring=keyring,
            metrics=self.fleet.metrics,
            on_death=lambda error: self.fleet.stop_with(
                error if isinstance(error, BapoError) else BapoError(f"the front of the agents failed: {error!r}")
            ),
        )
        self._run.write_port(AGENTS, port)
        self.front.start()

    def _listen_to_agents(self, host: str, port: int) -> socket.socket:
        """With port 0 the one from before a restart, which agents know."""
        what, before = "the address of the agents", self._run.read_port(AGENTS)
        if not port and before:
            try:
                return listen(host, before, what=what, key="agents.port")
            except ConfigError:
                log.info("port %d of the agents is taken: they need another", before)
        return listen(host, port, what=what, key="agents.port")

    def start(self, on_end: Callable[[], None]) -> None:
        """Start; returns immediately. `on_end` is called when the fleet has failed."""
        self._on_end = on_end
        self._thread.start()

    def scale(self, num: int) -> None:
        """Set the number of workers, also for a restart. Raises: ConfigError, StorageError."""
        self.fleet.scale(num)
        remember_target(self._run, self.fleet.prefix, self._config, num)

    def stop(self) -> None:
        """Stop all workers and the node."""
        if self.front is not None:
            self.front.stop()
        if self._follower:
            self._follower.stop()
        self.fleet.stop()
        self._ended.set()
        self._thread.join(NODE_S)

    def _live(self) -> None:
        """Run the node and the fleet. Any error stops the process, which could no longer sample."""
        try:
            self._run_node()
        except BapoError as error:
            self.fleet.stop_with(error)
        except Exception as error:  # a bug must stop the process, not only this thread
            log.exception("the fleet thread failed")
            self.fleet.stop_with(BapoError(f"the fleet thread failed: {error!r}"))

    def _run_node(self) -> None:
        """Start and stop the node in one thread: Ray's processes die with the thread that created them."""
        if self._in_process:
            self._run_fleet()
            return
        ray_environment.apply()
        from rollout_server.fleet.ray_node import RayNode  # here: in-process engines need no Ray

        node = RayNode(self._config.rollout)
        if node.is_cluster:
            self.own_url = reached_at(self.own_url, node.address)
            self._worker_url = reached_at(self._url, node.address, self._buffer_host)
        if node.is_bounded:
            self.autoscaler = self._make_autoscaler(room=node.room)
        node.watch(self._ended, self.fleet.stop_with)
        self._run_fleet()
        node.stop()

    def _run_fleet(self) -> None:
        self._has_node.set()
        buffer = BufferClient(self._url, retry_s=RELEASE_S)
        recorded = self._recorded_weights(buffer)
        if recorded is not None:
            self.fleet.begin_with(recorded)
        self._release_old_leases(buffer)
        if not self._ended.is_set():
            self.fleet.scale(recall_target(self._run, self.fleet.prefix, self._config))
            if self._follower:
                self._follower.start()
        self.autoscaler.run(self._ended)

    def _recorded_weights(self, buffer: BufferClient) -> WeightUpdate | None:
        """The recorded weights; waits for the buffer. With the base model the workers would wait for weights that the
        learner publishes only after their groups."""
        while not self._ended.is_set():
            try:
                return recall(self._run.weights_path, buffer)
            except UnavailableError as error:
                log.warning("workers cannot start until the buffer reports the progress of the run: %s", error)
                self._ended.wait(RELEASE_S)
        return None

    def _release_old_leases(self, buffer: BufferClient) -> None:
        """Release the leases of workers from before a restart."""
        own = re.compile(re.escape(self.fleet.prefix) + rf"(worker-[0-9]+(\.[0-9]+)?|{AGENTS})")
        try:
            for worker_id, leases in buffer.status().workers.items():
                if leases.leased and own.fullmatch(worker_id):
                    log.info("%s from before the restart released %d leases", worker_id, buffer.release(worker_id))
        except BapoError as error:
            log.warning("leases from before the restart were not released, they will expire: %s", error)

    def _make_autoscaler(self, room: Callable[[], int] | None) -> Autoscaler:
        buffer = BufferClient(self._url, timeout_s=AUTOSCALER_TIMEOUT_S, retry_s=0.0)
        return Autoscaler(self._config, self.fleet, buffer, self._telemetry, room=room)

    def _make_handle(self, worker_id: str) -> WorkerHandle:
        self._has_node.wait()
        if self._in_process:
            worker = make_worker(worker_id, self._config, self._url, run_path=self._run.path, server_url=self.own_url)
            return LocalHandle(worker)
        from rollout_server.fleet.ray_node import RayHandle

        return RayHandle(worker_id, self._config, self._worker_url, self._run.log_path(worker_id), self.own_url)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the rollout server."""
    parser.description = "Run the rollout server: a fleet of workers that sample, grade and push groups."
    parser.epilog = (__doc__ or "").partition("Examples:")[2]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--buffer-url", help="URL of the buffer service (default: from the config and RUN/ports)")
    parser.add_argument("--host", help="address to listen on (overrides BAPO_HOST and rollout.host)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for a free one (overrides rollout.port)")
    parser.add_argument(
        "--one-of-several",
        action="store_true",
        help="the run has several rollout servers, on hosts with different names and a shared RUN/weights: worker ids "
        "include the host name, and weights that another server received are loaded, too",
    )


def run(argv: Sequence[str] | None = None) -> None:
    """Start the process."""
    run_process("rollout_server", main, add_flags=add_flags, argv=argv)


if __name__ == "__main__":
    run()
