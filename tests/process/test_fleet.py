"""`python -m rollout_server` as a process: the scripted engine in threads, real vLLM in Ray actors, and how it ends."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config, ModelConfig
from tests.support.factories import make_request
from tests.support.rollout import MemoryBuffer, make_config, make_update
from tests.support.rollout_process import StartServer, assert_all_gone
from tests.support.wait import wait_until


def test_scripted_workers_sample_take_weights_scale_and_end_on_sigterm(
    start_server: StartServer, memory_buffer: tuple[MemoryBuffer, str], tmp_path: Path
) -> None:
    memory, url = memory_buffer
    server = start_server(make_config(), url)
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
    start_server: StartServer, memory_buffer: tuple[MemoryBuffer, str]
) -> None:
    memory, url = memory_buffer
    memory.add([make_request(prompt_id=f"p{i}") for i in range(8)])
    server = start_server(make_config(engine_options={"latency_s": 600.0}), url)
    wait_until(lambda: len(memory.leased) == 8)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
    assert memory.leased == {}
    assert memory.num_queued == 8


def test_a_model_that_does_not_exist_is_one_message_and_exit_code_2_before_ray_starts(
    start_server: StartServer,
) -> None:
    config = Config(model=ModelConfig(path="no/such-model"), rollout=RolloutConfig(port=0))
    server = start_server(config, "http://127.0.0.1:9")
    assert server.wait(60) == 2
    assert "'no/such-model' is neither a folder nor a model" in server.output()
    assert "Traceback" not in server.output()
    assert not list(server.run.path.glob("logs/worker*"))


def test_a_worker_that_keeps_crashing_stops_the_server_with_one_message(
    start_server: StartServer, memory_buffer: tuple[MemoryBuffer, str]
) -> None:
    memory, url = memory_buffer
    memory.add([make_request(prompt_id=f"p{i}") for i in range(8)])
    server = start_server(make_config(engine_options={"crash_after_groups": 0}), url)
    assert server.wait(60) == 3
    last_line = server.output().strip().splitlines()[-1]
    assert "3 rollout workers in a row died early" in last_line
    assert "scripted crash" in last_line
    assert memory.num_queued == 8, "nothing was lost"
