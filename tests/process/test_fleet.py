"""`python -m rollout_server` as a process: the scripted engine in threads, real vLLM in Ray actors, and how it ends."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from bapo.config.load import dump_toml
from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config, ModelConfig
from bapo.fleet_client import FleetClient
from bapo.records import RunDirectory
from bapo.types import Canary, WeightUpdate
from tests.factories import make_request
from tests.patience import PATIENCE_S, has_ended, wait_until
from tests.rollout_fakes import MemoryBuffer, Served, buffer_app, make_config, make_update

ENGINE_S = 240.0
"""Until a vLLM engine samples: a minute of a core that nobody else wants."""


@dataclass
class Server:
    """One process of the rollout server, and everything that it has ever started."""

    process: subprocess.Popen[bytes]
    run: RunDirectory
    log: Path
    seen: set[psutil.Process] = field(default_factory=set)

    def client(self, timeout_s: float = PATIENCE_S) -> FleetClient:
        wait_until(lambda: self.run.read_port("rollout_server") is not None, timeout_s=timeout_s)
        return FleetClient(f"http://127.0.0.1:{self.run.read_port('rollout_server')}")

    def descendants(self) -> set[psutil.Process]:
        if self.process.poll() is None:
            self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self.seen

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def output(self) -> str:
        return self.log.read_text()


PR_SET_CHILD_SUBREAPER = 36
"""Of prctl(2)."""

StartServer = Callable[..., Server]


@pytest.fixture
def buffer() -> Iterator[tuple[MemoryBuffer, str]]:
    memory = MemoryBuffer()
    served = Served(buffer_app(memory))
    yield memory, served.url
    served.stop()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartServer]:
    servers: list[Server] = []

    def start_server(config: Config, buffer_url: str) -> Server:
        run = RunDirectory.create(tmp_path / f"run-{len(servers)}", dump_toml(config))
        log = tmp_path / f"server-{len(servers)}.log"
        command = [sys.executable, "-m", "rollout_server", "--config", str(run.config_path)]
        command += ["--run-dir", str(run.path), "--buffer-url", buffer_url]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})
        servers.append(Server(process=process, run=run, log=log))
        return servers[-1]

    yield start_server
    for server in servers:
        left = server.descendants()
        server.process.kill()
        server.process.wait()
        for process in left:
            if process.is_running():
                process.kill()


@pytest.fixture
def adopting() -> Iterator[None]:
    """Orphans become children of this process, which does not wait for them: as in a container without an init."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    ours = set(psutil.Process().children())
    yield
    assert prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0
    for orphan in set(psutil.Process().children()) - ours:
        orphan.kill()
        orphan.wait(PATIENCE_S)


def assert_all_gone(processes: set[psutil.Process], timeout_s: float = PATIENCE_S) -> None:
    wait_until(lambda: all(map(has_ended, processes)), timeout_s=timeout_s)


def test_scripted_workers_sample_take_weights_scale_and_end_on_sigterm(
    start: StartServer, buffer: tuple[MemoryBuffer, str], tmp_path: Path
) -> None:
    memory, url = buffer
    server = start(make_config(), url)
    client = server.client()
    client.wait_ready(60)
    memory.add([make_request(prompt_id=f"p{i}") for i in range(50)])
    wait_until(lambda: len(memory.groups) == 50)
    client.update_weights(make_update(tmp_path / "w", 3), timeout_s=60)
    client.scale(2)
    wait_until(lambda: [worker.policy_version for worker in client.workers()] == [3, 3])
    memory.add([make_request(prompt_id=f"late{i}", min_version=3) for i in range(50)])
    wait_until(lambda: len(memory.groups) == 100)
    client.scale(1)
    wait_until(lambda: [worker.worker_id for worker in client.workers()] == ["worker-0"])
    descendants = server.descendants()
    assert len(descendants) >= 2, "the worker's two graders"
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
    assert time.monotonic() - began < 6.0
    assert_all_gone(descendants)
    assert memory.leased == {}


def test_sigterm_gives_the_leases_of_unfinished_groups_back(
    start: StartServer, buffer: tuple[MemoryBuffer, str]
) -> None:
    memory, url = buffer
    memory.add([make_request(prompt_id=f"p{i}") for i in range(8)])
    server = start(make_config(engine_options={"latency_s": 600.0}), url)
    wait_until(lambda: len(memory.leased) == 8)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
    assert memory.leased == {}
    assert memory.num_queued == 8


def test_sigterm_while_ray_is_coming_up_leaves_no_process(start: StartServer, tmp_path: Path) -> None:
    from tests.tiny_model import write_tiny_model

    write_tiny_model(tmp_path / "model")
    server = start(
        Config(model=ModelConfig(path=str(tmp_path / "model")), rollout=RolloutConfig(port=0)), "http://127.0.0.1:9"
    )
    server.client()
    wait_until(lambda: len(server.descendants()) >= 1)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
    assert_all_gone(server.seen)
    assert "Traceback" not in server.output()


def test_a_port_in_use_is_one_message_and_exit_code_2(start: StartServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start(make_config(port=port), "http://127.0.0.1:9")
        assert server.wait(60) == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in server.output()
    assert "Traceback" not in server.output()


def test_a_model_that_does_not_exist_is_one_message_and_exit_code_2_before_ray_starts(start: StartServer) -> None:
    config = Config(model=ModelConfig(path="no/such-model"), rollout=RolloutConfig(port=0))
    server = start(config, "http://127.0.0.1:9")
    assert server.wait(60) == 2
    assert "'no/such-model' is neither a folder nor a model" in server.output()
    assert "Traceback" not in server.output()
    assert not list(server.run.path.glob("logs/worker*"))


def test_an_engine_that_does_not_exist_is_refused_with_the_known_ones(start: StartServer) -> None:
    server = start(make_config(engine="vlm"), "http://127.0.0.1:9")
    assert server.wait(60) == 2
    assert "did you mean 'vllm'?" in server.output()


def test_a_worker_that_keeps_crashing_stops_the_server_with_one_message(
    start: StartServer, buffer: tuple[MemoryBuffer, str]
) -> None:
    memory, url = buffer
    memory.add([make_request(prompt_id=f"p{i}") for i in range(8)])
    server = start(make_config(engine_options={"crash_after_groups": 0}), url)
    assert server.wait(60) == 3
    last_line = server.output().strip().splitlines()[-1]
    assert "3 rollout workers in a row died early" in last_line
    assert "scripted crash" in last_line
    assert memory.num_queued == 8, "nothing was lost"


@pytest.mark.timeout(900)  # two starts of an engine, each a minute of one idle core
def test_real_vllm_in_ray_actors_samples_survives_a_kill_takes_weights_and_leaves_no_process(
    start: StartServer, buffer: tuple[MemoryBuffer, str], tmp_path: Path
) -> None:
    from tests.tiny_model import perturb, write_tiny_model

    memory, url = buffer
    learner = write_tiny_model(tmp_path / "model")
    config = Config(
        model=ModelConfig(path=str(tmp_path / "model")),
        rollout=RolloutConfig(port=0, max_workers=2, max_groups_in_flight=8),
    )
    server = start(config, url)
    client = server.client()
    client.wait_ready(ENGINE_S)
    server.descendants()
    memory.add([make_request(prompt_id=f"p{i}") for i in range(20)])
    wait_until(lambda: len(memory.groups) == 20)

    perturb(learner, seed=1)
    seconds = client.update_weights(update_of(learner, tmp_path, version=2), timeout_s=60)
    assert list(seconds) == ["worker-0"]

    first = client.workers()[0]
    assert psutil.Process(first.pid).nice() == psutil.Process().nice(), "engine and learner share the cores evenly"
    memory.add([make_request(prompt_id=f"killed{i}", min_version=2) for i in range(200)])
    wait_until(lambda: len(memory.groups) > 40)
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: client.workers()[0].restarts == 1, timeout_s=ENGINE_S)
    assert not any(owner == first.worker_id for owner in memory.leased.values())
    server.descendants()
    wait_until(lambda: len(memory.groups) == 220, timeout_s=ENGINE_S)
    second = client.workers()[0]
    assert (second.worker_id, second.policy_version) == ("worker-0.1", 2)
    assert {group.policy_version for group in memory.groups.values() if group.group_id.startswith("g-killed")} == {2}

    descendants = server.descendants()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
    assert_all_gone(descendants)
    assert "worker-0.1 is ready with version 2" in server.output()


def update_of(learner: object, folder: Path, *, version: int) -> WeightUpdate:
    from tests.tiny_model import reference_logprobs, save_weights

    path = folder / f"version-{version}.safetensors"
    save_weights(learner, path)
    tokens = (16, 103, 11, 214, 84, 209)
    return WeightUpdate(
        version=version,
        path=str(path),
        digest=hashlib.sha256(path.read_bytes()).hexdigest(),
        num_bytes=path.stat().st_size,
        canary=Canary(
            token_ids=tokens, logprobs=tuple(reference_logprobs(learner, list(tokens)).tolist()), tolerance=1e-4
        ),
    )


@pytest.mark.timeout(900)
def test_after_kill_9_of_the_server_its_workers_graders_and_ray_servers_are_gone(
    start: StartServer, buffer: tuple[MemoryBuffer, str], tmp_path: Path
) -> None:
    from tests.tiny_model import write_tiny_model

    write_tiny_model(tmp_path / "model")
    config = Config(model=ModelConfig(path=str(tmp_path / "model")), rollout=RolloutConfig(port=0, max_workers=1))
    server = start(config, buffer[1])
    server.client().wait_ready(ENGINE_S)
    # Ray's two agents (80 MB each, idle) end by themselves after a minute.
    ours = {process for process in server.descendants() if not process.name().endswith("Agent")}
    assert len(ours) >= 5, "gcs, raylet, a worker, two graders"
    server.process.kill()
    assert_all_gone(ours)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's subreapers are Linux'")
def test_a_worker_ends_with_a_raylet_that_nobody_waits_for(
    start: StartServer, buffer: tuple[MemoryBuffer, str], adopting: None
) -> None:
    server = start(make_config(engine="scripted_actor", max_workers=1), buffer[1])
    server.client().wait_ready(60)
    ours = {process for process in server.descendants() if not process.name().endswith("Agent")}
    raylet = next(process for process in ours if process.name() == "raylet")
    server.process.kill()
    wait_until(lambda: raylet.status() == psutil.STATUS_ZOMBIE)
    assert_all_gone(ours)


def test_a_worker_that_does_not_fit_in_memory_stops_the_server_with_one_message_and_loses_nothing(
    start: StartServer, buffer: tuple[MemoryBuffer, str], tmp_path: Path
) -> None:
    from tests.tiny_model import write_tiny_model

    memory, url = buffer
    memory.add([make_request(prompt_id=f"p{i}") for i in range(4)])
    write_tiny_model(tmp_path / "model")
    rollout = RolloutConfig(port=0, max_workers=1, engine_options={"kv_cache_memory_bytes": 1 << 44})
    server = start(Config(model=ModelConfig(path=str(tmp_path / "model")), rollout=rollout), url)
    assert server.wait(180) == 3
    assert "3 rollout workers in a row died early" in server.output()
    assert "out of memory" in server.output()
    assert "kv_cache_memory_bytes" in server.output(), "it says what to lower"
    assert memory.num_queued == 4
