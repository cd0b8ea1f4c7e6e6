"""URLs of the services of a run, on the same host: from the configuration, or from RUN/ports.

With a configured port of 0 a process takes a free one and writes it to RUN/ports.
"""

from __future__ import annotations

import time

from bapo.config.tree import Config
from bapo.core.addresses import http_url, reachable
from bapo.core.errors import DeadlineError
from bapo.runtime.run_directory.layout import RunDirectory

ANNOUNCE_TIMEOUT_S = 120.0
PAUSE_S = 0.05

BUFFER = "buffer_service"
ROLLOUT_SERVER = "rollout_server"
DASHBOARD = "dashboard"
AGENTS = "agents"


def buffer_url(config: Config, run: RunDirectory, *, timeout_s: float = ANNOUNCE_TIMEOUT_S) -> str:
    """URL of the buffer service. Raises: DeadlineError when it does not announce its port."""
    if config.buffer.url:
        return config.buffer.url
    return http_url(reachable(config.buffer.host), _port(run, BUFFER, config.buffer.port, timeout_s))


def rollout_url(config: Config, run: RunDirectory, *, timeout_s: float = ANNOUNCE_TIMEOUT_S) -> str:
    """URL of the rollout server's control API. Raises: DeadlineError when it does not announce its port."""
    return http_url(reachable(config.rollout.host), _port(run, ROLLOUT_SERVER, config.rollout.port, timeout_s))


def agents_url(config: Config, run: RunDirectory, *, timeout_s: float = ANNOUNCE_TIMEOUT_S) -> str:
    """URL that agents call, without `/v1`. Raises: DeadlineError when the rollout server does not announce its port."""
    assert config.agents is not None
    return http_url(reachable(config.agents.host), _port(run, AGENTS, config.agents.port, timeout_s))


def dashboard_url(config: Config, run: RunDirectory, *, timeout_s: float = ANNOUNCE_TIMEOUT_S) -> str:
    """URL of the run's web page. Raises: DeadlineError when it does not announce its port."""
    return http_url(reachable(config.dashboard.host), _port(run, DASHBOARD, config.dashboard.port, timeout_s)) + "/"


def _port(run: RunDirectory, process: str, configured: int, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while (port := configured or run.read_port(process)) is None:
        if time.monotonic() > deadline:
            raise DeadlineError(f"{process} has not announced its port in {run.path}/ports after {timeout_s:.0f} s")
        time.sleep(PAUSE_S)
    return port
