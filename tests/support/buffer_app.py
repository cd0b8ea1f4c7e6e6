"""The buffer service in a thread of the test, on a real socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi import FastAPI

from bapo.algorithms.composers.registry import load_composer
from bapo.config.tree import Config
from bapo.runtime.auth.api_tokens import Keyring
from bapo.runtime.metrics.server import Telemetry
from bapo.transport.buffer_client import BufferClient
from buffer_service.__main__ import Server, listen, uvicorn_config
from buffer_service.http.app import create_app
from buffer_service.http.context import Context
from buffer_service.metrics import BufferMetrics
from buffer_service.service import BufferService
from buffer_service.store.base import Store
from buffer_service.store.redis.frame_access import FrameAccess
from buffer_service.store.redis.store import RedisStore
from tests.support.buffer import new_store
from tests.support.wait import PATIENCE_S


def small_config(**sections: dict[str, Any]) -> Config:
    """B = 4, G = 8, and whatever the test changes."""
    given = {"algorithm": {"batch_size": 4}, "learner": {"minibatch_size": 4}, **sections}
    return Config.model_validate(given)


def served_app(store: Store, config: Config, keyring: Keyring | None = None) -> FastAPI:
    """The app of a service on the store."""
    metrics = BufferMetrics(Telemetry(), config)
    service = BufferService(store, load_composer(config.algorithm), config, metrics)
    access = FrameAccess(store._link, store._keys, store._run_name) if isinstance(store, RedisStore) else None
    return create_app(Context(service=service, config=config, access=access), metrics, keyring)


@contextmanager
def serving(
    store: Store,
    config: Config,
    keyring: Keyring | None = None,
    *,
    port: int = 0,
) -> Iterator[BufferClient]:
    """A client of a service on the store; the service ends with the block."""
    app = served_app(store, config, keyring)
    listener = listen("127.0.0.1", port, what="the buffer service", key="buffer.port")
    server = Server(uvicorn_config(app), app.state.context)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    client = BufferClient(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=PATIENCE_S, retry_s=PATIENCE_S)
    client.wait_ready(PATIENCE_S)
    try:
        yield client
    finally:
        server.handle_exit(15, None)
        thread.join(PATIENCE_S)
        listener.close()
        assert not thread.is_alive(), "the service did not end"


@contextmanager
def serving_kind(
    request: pytest.FixtureRequest, config: Config, *, run: str, max_attempts: int = 3
) -> Iterator[tuple[Store, BufferClient]]:
    """A store, and a client of a service on it."""
    store = new_store(request.getfixturevalue("redis_server").url, run=run, max_attempts=max_attempts)
    with serving(store, config) as client:
        yield store, client
