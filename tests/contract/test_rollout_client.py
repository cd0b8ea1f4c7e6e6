"""The fleet's API and its client, over real HTTP in one process: values survive, errors come back as themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config
from bapo.core.errors import ContractError, DeadlineError, StaleWeightsError
from bapo.core.json_values import from_map, to_map
from bapo.core.types import Canary, WeightUpdate
from bapo.runtime.metrics.server import Telemetry
from bapo.transport.rollout_client import RolloutClient
from rollout_server.api import create_app
from rollout_server.engines.scripted import make_engine, make_tokenization
from rollout_server.fleet.fleet import Fleet
from rollout_server.fleet.worker_handle import LocalHandle
from rollout_server.worker import Worker
from tests.support.rollout import InstantGrader, MemoryBuffer, Served, make_update
from tests.support.wait import PATIENCE_S


@pytest.fixture
def buffer() -> MemoryBuffer:
    return MemoryBuffer()


@pytest.fixture
def served(buffer: MemoryBuffer, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Fleet, RolloutClient]]:
    monkeypatch.setattr("rollout_server.fleet.fleet.POLL_S", 0.01)
    config = Config(rollout=RolloutConfig(engine="scripted", max_workers=3))

    def make_handle(worker_id: str) -> LocalHandle:
        worker = Worker(
            worker_id=worker_id,
            config=config,
            buffer=buffer,
            make_engine=make_engine,
            make_tokenization=make_tokenization,
            make_grader=lambda _: InstantGrader(),
        )
        return LocalHandle(worker)

    telemetry = Telemetry()
    fleet = Fleet(config, make_handle=make_handle, release=buffer.release, telemetry=telemetry, on_fatal=lambda _: None)
    server = Served(create_app(fleet, telemetry))
    yield fleet, RolloutClient(server.url, retry_s=0.2)
    fleet.stop()
    server.stop()


def test_a_weight_update_survives_json() -> None:
    update = WeightUpdate(
        version=3,
        path="/weights/w",
        digest="ab",
        num_bytes=17,
        canary=Canary(token_ids=(1, 2, 3), logprobs=(-0.1, -2.5), tolerance=1e-3),
    )
    assert from_map(json.loads(json.dumps(to_map(update))), WeightUpdate, "update") == update


@pytest.mark.parametrize("missing", ["version", "canary"])
def test_an_update_without_one_of_its_fields_is_refused(missing: str, tmp_path: Path) -> None:
    fields = to_map(make_update(tmp_path / "w", 1))
    del fields[missing]
    with pytest.raises(ContractError, match=missing):
        from_map(fields, WeightUpdate, "update")


@pytest.mark.parametrize("num", ["2", True, 2.0])
def test_what_is_no_number_in_json_is_refused_with_its_place(served: tuple[Fleet, RolloutClient], num: object) -> None:
    _, client = served
    reply = urllib3.request("PUT", client.url + "/workers", json={"num": num}, retries=False)
    assert (reply.status, "body.num: Input should be a valid integer" in reply.json()["message"]) == (422, True)
    update = {"version": 1, "path": "w", "digest": "ab", "num_bytes": 1}
    canary = {"token_ids": [1], "logprobs": [0.0], "tolerance": 0.1}
    for wrong, message in (
        ({"num_bytes": -1, "canary": canary}, "Expected `int` >= 0 - at `$.num_bytes`"),
        ({"canary": {**canary, "logprobs": ["0"]}}, "Expected `float`, got `str` - at `$.canary.logprobs[0]`"),
    ):
        reply = urllib3.request("POST", client.url + "/weights", json={**update, **wrong}, retries=False)
        assert (reply.status, message in reply.json()["message"]) == (422, True)


def test_waiting_for_a_worker_ends_with_the_servers_own_reason(served: tuple[Fleet, RolloutClient]) -> None:
    _, client = served
    with pytest.raises(DeadlineError, match="none started"):
        client.wait_ready(0.2)


def test_an_update_reaches_the_workers_and_an_older_one_comes_back_as_its_error(
    served: tuple[Fleet, RolloutClient], tmp_path: Path
) -> None:
    _, client = served
    client.scale(1)
    client.wait_ready(PATIENCE_S)
    seconds = client.update_weights(make_update(tmp_path / "w", 5), timeout_s=10)
    assert list(seconds) == ["worker-0"]
    assert 0.0 < seconds["worker-0"] < 5.0
    assert client.workers()[0].policy_version == 5
    with pytest.raises(StaleWeightsError):
        client.update_weights(make_update(tmp_path / "w", 4), timeout_s=10)
    client.update_weights(make_update(tmp_path / "w", 4), timeout_s=10, rollback=True)
    assert client.workers()[0].policy_version == 4
