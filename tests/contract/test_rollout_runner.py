"""The rollout server's own thread: what ends it before its time ends the process, and is said."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from bapo.config.tree import Config
from bapo.core.types import Progress
from bapo.runtime.metrics.metric import Process
from bapo.runtime.metrics.server import Telemetry
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.buffer_client import BufferClient
from rollout_server.__main__ import Runner
from rollout_server.weights.newest import remember
from tests.support.buffer import new_store
from tests.support.buffer_app import serving
from tests.support.factories import make_request
from tests.support.redis_server import free_port
from tests.support.rollout import make_config, make_update
from tests.support.wait import wait_until

CONFIG = make_config()


def test_a_fleet_whose_thread_fails_ends_the_server_and_names_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Runner) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(Runner, "_run_fleet", fail)
    config = Config.model_validate({"rollout": {"engine": "scripted"}})
    telemetry = Telemetry(Process.ROLLOUT_SERVER, run="test")
    ends: list[str] = []
    runner = Runner(config, RunDirectory(tmp_path), "http://127.0.0.1:1", telemetry)
    runner.start(on_end=lambda: ends.append("ended"))
    runner.stop()
    assert ends == ["ended"]
    assert runner.fleet.fatal is not None
    assert "KeyError('lost')" in str(runner.fleet.fatal)
    assert runner.fleet.fatal.exit_code == 1


def test_workers_begin_with_the_newest_weights_also_when_the_buffer_comes_later_than_the_fleet(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory.create(tmp_path / "run")
    release_s = 0.2
    monkeypatch.setattr("rollout_server.__main__.RELEASE_S", release_s)
    monkeypatch.setattr("rollout_server.__main__.BufferClient", partial(BufferClient, retry_s=0.1))
    remember(run.weights_path, make_update(run.weights_path / "version-000004.safetensors", 4))
    port = free_port()
    runner = Runner(CONFIG, run, f"http://127.0.0.1:{port}", Telemetry(Process.ROLLOUT_SERVER, run="test"))
    runner.start(on_end=lambda: None)
    try:
        time.sleep(2 * release_s)
        assert runner.fleet.statuses() == [], "nothing is sampled with other weights"
        store = new_store(redis_url)
        store.report(Progress(step=4, policy_version=4))
        with serving(store, CONFIG, port=port):
            wait_until(lambda: [status.policy_version for status in runner.fleet.statuses()] == [4])
            runner.stop()
    finally:
        runner.stop()


def test_leases_of_replaced_workers_of_an_earlier_life_are_given_back(redis_url: str, tmp_path: Path) -> None:
    store = new_store(redis_url)
    store.enqueue([make_request(prompt_id=f"p{i}", min_version=9) for i in range(3)], cursor=3)
    for name in ("worker-0.2", "worker-7", "their-worker-0"):
        assert len(store.claim(name, limit=1, policy_version=9, with_fresh=True)) == 1
    with serving(store, CONFIG) as buffer:
        run = RunDirectory.create(tmp_path / "run")
        runner = Runner(CONFIG, run, buffer.url, Telemetry(Process.ROLLOUT_SERVER, run="test"))
        runner.start(on_end=lambda: None)
        wait_until(lambda: any(status.state == "ready" for status in runner.fleet.statuses()))
        held = {name: worker.leased for name, worker in buffer.status().workers.items() if worker.leased}
        assert held == {"their-worker-0": 1}
        assert buffer.status().queued["fresh"] == 2
        runner.stop()
