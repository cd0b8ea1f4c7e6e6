"""What is refused before anything starts, and what the embedded Redis is told."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bapo.config.tree import Config
from bapo.core.errors import ConfigError, UnavailableError
from services.launcher.doctor.checks import preflight, redis_answer

SMALL = {"batch_size": 4}


def make_config(tmp_path: Path, **sections: dict[str, Any]) -> Config:
    """A configuration that passes: free ports, a model folder, ten problems."""
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "task": {"options": {"num_train": 10, "num_held_out": 3}},
        "algorithm": SMALL,
        "learner": {"port": 0, "minibatch_size": 2},
        "buffer": {"port": 0},
        "rollout": {"port": 0},
        "scheduler": {"port": 0},
        "evaluation": {"port": 0},
    }
    return Config.model_validate({name: tree.get(name, {}) | sections.get(name, {}) for name in {*tree, *sections}})


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_in_use_is_named_with_its_key_and_a_way_out(tmp_path: Path, taken_port: int) -> None:
    config = make_config(tmp_path, learner={"port": taken_port, "minibatch_size": 2})
    with pytest.raises(ConfigError, match=rf"learner\.port: cannot listen on 127\.0\.0\.1:{taken_port}: .*in use"):
        preflight(config)
    preflight(config, with_learner=False)  # `bapo up` starts no learner


def test_an_unreachable_redis_is_unavailable_and_says_how_to_do_without(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    config = make_config(tmp_path, buffer={"port": 0, "redis_url": f"redis://127.0.0.1:{closed}/0"})
    with pytest.raises(UnavailableError, match=rf"no Redis answers at redis://127\.0\.0\.1:{closed}/0: .*refused"):
        preflight(config)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"-NOAUTH Authentication required.\r\n", None),  # a server that wants a password is a server
        (b"HTTP/1.1 400 Bad Request\r\n", 'Protocol error, got "H" as reply type byte'),
    ],
)
def test_what_answers_like_redis_is_taken_for_redis(answer: bytes, reason: str | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(64)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert redis_answer(f"redis://127.0.0.1:{server.getsockname()[1]}") == reason
        thread.join()
