"""The web page of a live run: its records and the state of its buffer.

`python -m services.dashboard --config RUN/config.toml --run-dir RUN [--buffer-url URL] [--host HOST] [--port PORT]
[--announce TEXT]`. The port is written to RUN/ports/dashboard unless --port is given; nothing else is written to RUN,
so it may be mounted read-only.
"""

from __future__ import annotations

import argparse
import logging

import uvicorn

from bapo.core.addresses import authority
from bapo.runtime.auth.api_tokens import keyring_for, listen_host
from bapo.runtime.metrics.metric import Process
from bapo.runtime.metrics.server import Telemetry
from bapo.runtime.process import Flags, run_process
from bapo.transport.endpoints import DASHBOARD
from bapo.transport.listen import listen
from services.dashboard.app import create_app, uvicorn_config
from services.dashboard.endpoints import view_of
from services.dashboard.run_view import LiveBuffer

log = logging.getLogger(__name__)


def main(flags: Flags) -> None:
    """Serve until SIGTERM. Raises: ConfigError for a port in use."""
    config, port = flags.config, flags.extra.port
    host = listen_host(flags.extra.host, config.dashboard.host)
    keyring = keyring_for("the dashboard", host, config.security.tokens)
    view = view_of(flags.run, config, LiveBuffer(config, flags.run, flags.extra.buffer_url))
    app = create_app(view, Telemetry(Process.DASHBOARD, run=config.run.name), keyring)
    with listen(
        host, config.dashboard.port if port is None else port, what="the dashboard", key="dashboard.port"
    ) as listener:
        if not port:
            flags.run.write_port(DASHBOARD, int(listener.getsockname()[1]))
        log.info("run=%s listening on %s", config.run.name, authority(*listener.getsockname()[:2]))
        if flags.extra.announce:
            log.info("%s", flags.extra.announce)
        uvicorn.Server(uvicorn_config(app)).run(sockets=[listener])


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--buffer-url", help="URL of the buffer service (default: from the config and RUN/ports)")
    parser.add_argument("--host", help="address to listen on (overrides BAPO_HOST and dashboard.host)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for a free one (overrides dashboard.port)")
    parser.add_argument("--announce", help="line to log at startup, e.g. the page's URL outside of the container")


if __name__ == "__main__":
    run_process("services.dashboard", main, add_flags=_add_flags)
