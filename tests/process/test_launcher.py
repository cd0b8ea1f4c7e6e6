"""The launcher's own parts against real processes: embedded Redis, doctor, the report as a process."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from bapo.config.buffer import BufferConfig
from bapo.runtime.run_directory.layout import RunDirectory
from services.launcher.embedded_redis import redis_spec
from services.launcher.supervision.child_process import Child, end
from tests.support.launch import FREE_PORTS, start, train_arguments
from tests.support.tiny_model import write_tiny_model
from tests.support.wait import wait_until


class Server:
    """The embedded Redis of a run, started and killed at will."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self.child: Child | None = None

    def start(self) -> redis.Redis:
        spec, url = redis_spec(self._run, BufferConfig(max_memory_mb=64), {})
        self.child = child = Child(spec)

        def is_up() -> bool:
            child.poll()
            return child.ready_after_s is not None

        wait_until(is_up, what="Redis answers")
        return redis.Redis.from_url(url)

    def kill(self) -> None:
        assert self.child is not None
        self.child.process.kill()
        self.child.process.wait()


def fill(client: redis.Redis, *, num_mb: int) -> None:
    for number in range(num_mb):
        client.set(f"key-{number}", b"x" * (1 << 20))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(RunDirectory.create(tmp_path / "run"))
    yield made
    if made.child is not None:
        end([made.child], grace_s=2.0)


def test_what_the_embedded_redis_acknowledged_survives_kill_9(server: Server) -> None:
    with server.start() as client:
        for number in range(500):
            client.set(f"key-{number}", "x" * 100)
    server.kill()
    with server.start() as client:
        assert client.dbsize() == 500


def test_the_embedded_redis_refuses_what_does_not_fit_and_evicts_nothing(server: Server) -> None:
    with server.start() as client:
        client.set("first", "kept")
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            fill(client, num_mb=80)
        assert client.get("first") == b"kept"


def doctor(tmp_path: Path, *overrides: str) -> tuple[int, dict[str, dict[str, str]]]:
    model = tmp_path / "model"
    if not model.exists():
        write_tiny_model(model)
    tokens = ["--model.path", str(model), "--run.root", str(tmp_path), "--task.options.num_train", "64", *FREE_PORTS,
              "--rollout.max_prompt_tokens", "64", "--rollout.max_response_tokens", "64"]  # fmt: skip
    process = start(["doctor", "bapo", "--json", "--algorithm.batch_size", "8", "--learner.minibatch_size", "8",
                     *tokens, *overrides])  # fmt: skip
    output, _ = process.communicate(timeout=120)
    start_of_json = output.index("[")
    return process.returncode, {row["name"]: row for row in json.loads(output[start_of_json:])}


def test_the_doctor_finds_a_sound_machine_sound(tmp_path: Path) -> None:
    code, found = doctor(tmp_path)
    assert (code, {name for name, row in found.items() if row["status"] == "fail"}) == (0, set())
    assert found["gold answers"]["detail"] == "50 of 50 rewarded 1"
    assert "20 prompts pass a round trip" in found["tokenizer"]["detail"]
    assert found["redis starts"]["status"] == "ok"


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["--buffer.port", "{port}"], 2, "port {port} (buffer.port) is in use by another program"),
        (
            ["--buffer.redis_url", "redis://127.0.0.1:{closed}"],
            3,
            "Redis at redis://127.0.0.1:{closed} does not respond",
        ),
        (["--model.path", "/nowhere/model"], 2, "model.path: folder /nowhere/model not found"),
    ],
)
def test_what_cannot_work_is_refused_in_one_message_and_the_name_stays_free(
    tmp_path: Path, overrides: list[str], code: int, words: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        ports = {"port": server.getsockname()[1], "closed": other.getsockname()[1]}
        other.close()
        process = start(train_arguments(tmp_path, *(token.format(**ports) for token in overrides)))
        output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert words.format(**ports) in output
    assert "Traceback" not in output
    assert not (tmp_path / "outputs" / "run").exists()
