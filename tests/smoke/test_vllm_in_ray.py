"""`python -m rollout_server` as a process: the scripted engine in threads, real vLLM in Ray actors, and how it ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config, ModelConfig
from bapo.core.types import Canary, WeightUpdate
from bapo.runtime.file_digest import digest_of
from tests.support.factories import make_request
from tests.support.rollout import MemoryBuffer
from tests.support.rollout_process import ENGINE_S, StartServer, assert_all_gone
from tests.support.wait import wait_until


@pytest.mark.timeout(900)  # two starts of an engine, each a minute of one idle core
def test_real_vllm_in_ray_actors_samples_survives_a_kill_takes_weights_and_leaves_no_process(
    start_server: StartServer, memory_buffer: tuple[MemoryBuffer, str], tmp_path: Path
) -> None:
    from tests.support.tiny_model import perturb, write_tiny_model

    memory, url = memory_buffer
    learner = write_tiny_model(tmp_path / "model")
    config = Config(
        model=ModelConfig(path=str(tmp_path / "model")),
        rollout=RolloutConfig(port=0, max_workers=2, max_groups_in_flight=8),
    )
    server = start_server(config, url)
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
    from tests.support.tiny_model import reference_logprobs, save_weights

    path = folder / f"version-{version}.safetensors"
    save_weights(learner, path)
    tokens = (16, 103, 11, 214, 84, 209)
    return WeightUpdate(
        version=version,
        path=str(path),
        digest=digest_of(path),
        num_bytes=path.stat().st_size,
        canary=Canary(
            token_ids=tokens, logprobs=tuple(reference_logprobs(learner, list(tokens)).tolist()), tolerance=1e-4
        ),
    )
