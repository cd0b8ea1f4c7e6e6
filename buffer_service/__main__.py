"""`python -m buffer_service --config RUN/config.toml --run-dir RUN [--redis-url URL] [--host HOST] [--port PORT]`.

Examples:
    python -m buffer_service --config outputs/demo/config.toml --run-dir outputs/demo --redis-url redis://127.0.0.1:6380/0
    python -m buffer_service --config RUN/config.toml --run-dir RUN --redis-url unix:///RUN/redis/redis.sock --port 0

The OpenAPI docs are served at /docs. The port actually bound is written to RUN/ports/buffer_service.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import uvicorn

from bapo.algorithms.composers.registry import load_composer
from bapo.config.tree import Config
from bapo.core.addresses import authority
from bapo.core.errors import ConfigError, UnavailableError
from bapo.runtime.auth.api_tokens import keyring_for, listen_host
from bapo.runtime.auth.redis_password import URL, password_file, problem_of_url, refuse_open, with_password
from bapo.runtime.logs import RateLimitedFilter
from bapo.runtime.metrics.metric import Process
from bapo.runtime.metrics.server import Telemetry, show_disk
from bapo.runtime.process import Flags, end_now, run_process
from bapo.transport.http_guard import SERVER_SETTINGS
from bapo.transport.listen import BACKLOG, listen
from buffer_service.assembly import in_step_order
from buffer_service.http.app import create_app
from buffer_service.http.context import Context
from buffer_service.metrics import BufferMetrics
from buffer_service.service import BufferService
from buffer_service.state import Health
from buffer_service.store.redis.connection import RedisLink, address
from buffer_service.store.redis.frame_access import FrameAccess
from buffer_service.store.redis.keys import Keys
from buffer_service.store.redis.requirements import refuse_other_format, refuse_other_settings, refuse_unsuited
from buffer_service.store.redis.store import RedisStore

log = logging.getLogger(__name__)

REDIS_TIMEOUT_S = 30.0
PAUSE_S = 0.2
LOG_EVERY_S = 30.0
"""Log interval while waiting for Redis."""
KEEP_ALIVE_S = 120
"""Longer than the idle time between two calls of a client."""
SHUTDOWN_S = 2


class Server(uvicorn.Server):
    """Ends long polls on shutdown: otherwise uvicorn would wait for each of them to time out."""

    def __init__(self, config: uvicorn.Config, context: Context) -> None:
        super().__init__(config)
        self._context = context
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal arrives."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop on SIGTERM or SIGINT, at once on the second. Replaces uvicorn's handler, which re-raises the signal."""
        self.force_exit = self.should_exit
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._context.close)


SWITCH_S = 0.0005
"""Python's thread switch interval; the default is 5 ms. Needed for a push latency of 10 ms (p99): a push switches
threads twice and would wait 5 ms each time while a batch is assembled or a snapshot is listed."""


def main(flags: Flags) -> None:
    """Serve until SIGTERM.

    Raises: ConfigError if the port is in use or Redis is unsuitable; UnavailableError if Redis does not start.
    """
    sys.setswitchinterval(SWITCH_S)
    config = flags.config
    url, secret = redis_url(flags)
    telemetry = Telemetry(Process.BUFFER_SERVICE, run=config.run.name)
    show_disk(telemetry, flags.run.path)
    metrics = BufferMetrics(telemetry, config)
    link = RedisLink(url, on_error=metrics.redis_failed, password_file=secret)
    store = RedisStore(
        link,
        config.run.name,
        lease_s=config.buffer.lease_s,
        max_attempts=config.buffer.max_attempts,
        in_step_order=in_step_order(config),
    )
    port = config.buffer.port if flags.extra.port is None else flags.extra.port
    host = listen_host(flags.extra.host, config.buffer.host)
    keyring = keyring_for("the buffer service", host, config.security.tokens)
    listener = listen(host, port, what="the buffer service", key="buffer.port")
    keys = Keys(config.run.name)
    wait_for(lambda: prepare(store, link, keys, config), flags.extra.redis_timeout_s)
    context = Context(
        service=BufferService(store, load_composer(config.algorithm), config, metrics),
        config=config,
        access=FrameAccess(link, keys, config.run.name),
    )
    server = Server(uvicorn_config(create_app(context, metrics, keyring)), context)
    flags.run.write_port("buffer_service", int(listener.getsockname()[1]))
    log.info("run=%s listening on %s, redis=%s", config.run.name, authority(*listener.getsockname()[:2]), link.where)
    server.run(sockets=[listener])
    # Python would join the remaining threads, which wait up to 30 s for a Redis that does not respond.
    end_now(0)


def redis_url(flags: Flags) -> tuple[str, Path | None]:
    """Redis URL from the flag, the environment or the config, and the password file. Raises: ConfigError."""
    found = flags.extra.redis_url or os.environ.get(URL) or flags.config.buffer.redis_url
    if not found:
        raise ConfigError("no Redis URL: set buffer.redis_url in the config, or pass --redis-url URL")
    if problem := problem_of_url(found):
        raise ConfigError(f"buffer.redis_url {address(found)} {problem}")
    url = with_password(found)
    refuse_open(url, allowed=flags.config.security.open_redis)
    return url, password_file(found)


def uvicorn_config(app: object) -> uvicorn.Config:
    """Server settings: own log format, keep-alive connections, bounded shutdown."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
        backlog=BACKLOG,
        **SERVER_SETTINGS,
    )


def prepare(store: RedisStore, link: RedisLink, keys: Keys, config: Config) -> Health:
    """Check Redis and load scripts before the first request.

    Raises: UnavailableError; ConfigError for an unsuitable Redis, a run stored in another format, or settings that
    differ from those of the run.
    """
    refuse_unsuited(link)
    refuse_other_settings(link, config)
    health = store.health()
    refuse_other_format(link, keys)
    link.load_scripts()
    return health


def wait_for(attempt: Callable[[], Health], timeout_s: float) -> None:
    """Retry the whole attempt until it succeeds: Redis may fail in the middle of it. Raises: UnavailableError."""
    deadline, seldom = time.monotonic() + timeout_s, RateLimitedFilter(LOG_EVERY_S)
    while True:
        try:
            health = attempt()
        except UnavailableError as error:
            if (left := deadline - time.monotonic()) < 0:
                raise
            if seldom.is_due("waits"):
                log.warning("not listening yet, retrying for up to %.0f s: %s", left, error)
            time.sleep(PAUSE_S)
            continue
        if not health.persistent:
            log.warning("%s: %s", health.where, health.detail)
        return


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the buffer service."""
    parser.description = "Run the buffer service, which assembles batches from groups stored in Redis."
    parser.epilog = (__doc__ or "").partition("Examples:")[2]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--redis-url",
        help="Redis or Valkey, 6.2 or newer (overrides BAPO_REDIS_URL and buffer.redis_url); put the password into "
        "BAPO_REDIS_PASSWORD_FILE, because every user of a machine can list the arguments of its processes",
    )
    parser.add_argument("--host", help="address to listen on (overrides BAPO_HOST and buffer.host)")
    parser.add_argument(
        "--redis-timeout-s",
        type=float,
        default=REDIS_TIMEOUT_S,
        help="seconds to wait for Redis to start and load its data (default: %(default)s)",
    )
    parser.add_argument("--port", type=int, help="port to listen on, 0 for a free one (overrides buffer.port)")


def run(argv: Sequence[str] | None = None) -> None:
    """Start the process."""
    run_process("buffer_service", main, add_flags=add_flags, argv=argv)


if __name__ == "__main__":
    run()
