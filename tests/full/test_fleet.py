"""`python -m rollout_server` as a process: the scripted engine in threads, real vLLM in Ray actors, and how it ends."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config, ModelConfig
from tests.support.factories import make_request
from tests.support.rollout import MemoryBuffer, make_config
from tests.support.rollout_process import ENGINE_S, StartServer, assert_all_gone
from tests.support.wait import PATIENCE_S, wait_until

PR_SET_CHILD_SUBREAPER = 36
"""Of prctl(2)."""


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


def test_sigterm_while_ray_is_coming_up_leaves_no_process(start_server: StartServer, tmp_path: Path) -> None:
    from tests.support.tiny_model import write_tiny_model

    write_tiny_model(tmp_path / "model")
    server = start_server(
        Config(model=ModelConfig(path=str(tmp_path / "model")), rollout=RolloutConfig(port=0)), "http://127.0.0.1:9"
    )
    server.client()
    wait_until(lambda: len(server.descendants()) >= 1)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
    assert_all_gone(server.seen)
    assert "Traceback" not in server.output()


@pytest.mark.timeout(900)
def test_after_kill_9_of_the_server_its_workers_graders_and_ray_servers_are_gone(
    start_server: StartServer, memory_buffer: tuple[MemoryBuffer, str], tmp_path: Path
) -> None:
    from tests.support.tiny_model import write_tiny_model

    write_tiny_model(tmp_path / "model")
    config = Config(model=ModelConfig(path=str(tmp_path / "model")), rollout=RolloutConfig(port=0, max_workers=1))
    server = start_server(config, memory_buffer[1])
    server.client().wait_ready(ENGINE_S)
    # Ray's two agents (80 MB each, idle) end by themselves after a minute.
    ours = {process for process in server.descendants() if not process.name().endswith("Agent")}
    assert len(ours) >= 5, "gcs, raylet, a worker, two graders"
    server.process.kill()
    assert_all_gone(ours)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's subreapers are Linux'")
def test_a_worker_ends_with_a_raylet_that_nobody_waits_for(
    start_server: StartServer, memory_buffer: tuple[MemoryBuffer, str], adopting: None
) -> None:
    server = start_server(make_config(engine="scripted_actor", max_workers=1), memory_buffer[1])
    server.client().wait_ready(60)
    ours = {process for process in server.descendants() if not process.name().endswith("Agent")}
    raylet = next(process for process in ours if process.name() == "raylet")
    server.process.kill()
    wait_until(lambda: raylet.status() == psutil.STATUS_ZOMBIE)
    assert_all_gone(ours)


def test_a_worker_that_does_not_fit_in_memory_stops_the_server_with_one_message_and_loses_nothing(
    start_server: StartServer, memory_buffer: tuple[MemoryBuffer, str], tmp_path: Path
) -> None:
    from tests.support.tiny_model import write_tiny_model

    memory, url = memory_buffer
    memory.add([make_request(prompt_id=f"p{i}") for i in range(4)])
    write_tiny_model(tmp_path / "model")
    rollout = RolloutConfig(port=0, max_workers=1, engine_options={"kv_cache_memory_bytes": 1 << 44})
    server = start_server(Config(model=ModelConfig(path=str(tmp_path / "model")), rollout=rollout), url)
    assert server.wait(180) == 3
    assert "3 rollout workers in a row died early" in server.output()
    assert "out of memory" in server.output()
    assert "kv_cache_memory_bytes" in server.output(), "it says what to lower"
    assert memory.num_queued == 4
