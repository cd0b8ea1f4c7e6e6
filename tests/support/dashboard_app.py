"""The dashboard of a run in a thread of the test, on a real socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from bapo.config.load import load_resolved
from bapo.config.tree import Config
from bapo.runtime.auth.api_tokens import Keyring
from bapo.runtime.metrics.metric import Process
from bapo.runtime.metrics.server import Telemetry
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.listen import listen
from services.dashboard.app import create_app, uvicorn_config
from services.dashboard.endpoints import view_of
from services.dashboard.run_view import LiveBuffer
from tests.support.wait import PATIENCE_S


def dashboard_app(run: RunDirectory, keyring: Keyring | None = None, *, buffer_url: str = "") -> FastAPI:
    """The app of a run; of one whose directory is empty, with a configuration of defaults."""
    config = load_resolved(run.config_path) if run.config_path.exists() else Config()
    live = LiveBuffer(config, run, buffer_url) if buffer_url else None
    return create_app(view_of(run, config, live), Telemetry(Process.DASHBOARD), keyring)


@contextmanager
def serving_dashboard(run: RunDirectory, keyring: Keyring | None = None) -> Iterator[str]:
    """Its address; the service ends with the block."""
    with listen("127.0.0.1", 0, what="the dashboard", key="--port") as listener:
        server = uvicorn.Server(uvicorn_config(dashboard_app(run, keyring)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join(PATIENCE_S)
