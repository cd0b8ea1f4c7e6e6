"""Weights sent to the workers' engines: vLLM's packed protocol over gloo, the real fleet and API, and failures."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config
from bapo.core.errors import BapoError, ConfigError, ContractError
from bapo.core.types import Canary, WeightTransfer
from bapo.runtime.metrics.server import Telemetry
from bapo.transport.rollout_client import RolloutClient
from learner.transfer_weights import MAX_FAILURES, NcclSender, backend_of, in_order, make_sender
from rollout_server.api import create_app
from rollout_server.fleet.fleet import Fleet
from rollout_server.fleet.worker_handle import WorkerDiedError
from tests.support.gloo_transfer import PHASES, GlooGroup, Receiver
from tests.support.learner import learner_config
from tests.support.rollout import Served, make_update
from tests.support.wait import wait_until

LIMIT_S = 2.0
"""Deadline of a transfer."""
SLACK_S = 2.0
CANARY = Canary(token_ids=(4, 5), logprobs=(-1.0,), tolerance=1e-3)
CPU = torch.device("cpu")


def weights(version: int) -> dict[str, Tensor]:
    """Tensors of several dtypes, whose packing ends inside, at and beyond a buffer of 100 bytes."""
    generator = torch.Generator().manual_seed(version)
    made = {f"layer.{i}": torch.randn(size, generator=generator).bfloat16() for i, size in enumerate((1, 49, 51, 300))}
    made = {**made, "matrix": torch.randn(3, 5, generator=generator), "counter": torch.tensor([version])}
    return in_order(made, torch.bfloat16)


class Rig:
    """A learner's sender, a rollout server, and workers in threads."""

    def __init__(self, folder: Path) -> None:
        self.store = HashStore()
        self.at: Callable[[str, str], None] = lambda worker_id, phase: None
        self.receivers: list[Receiver] = []
        self.fatal: list[BapoError] = []
        self.folder = folder
        config = Config(rollout=RolloutConfig(sync_timeout_s=LIMIT_S))
        self.fleet = Fleet(
            config, make_handle=self._make, release=lambda _: None, telemetry=Telemetry(), on_fatal=self.fatal.append
        )
        self.server = Served(create_app(self.fleet, Telemetry()))
        self.client = RolloutClient(self.server.url)
        self.ids: list[bytes] = []
        self.sender = NcclSender(self.client, timeout_s=LIMIT_S, join=self.join, make_id=self.make_id, buffer_bytes=100)

    def _make(self, worker_id: str) -> Receiver:
        receiver = Receiver(worker_id, self.store, lambda worker, phase: self.at(worker, phase))
        self.receivers.append(receiver)
        return receiver

    def join(self, unique_id: bytes, world_size: int) -> GlooGroup:
        return GlooGroup(self.store, unique_id, 0, world_size)

    def make_id(self) -> bytes:
        self.ids.append(os.urandom(128))
        return self.ids[-1]

    def scale(self, num: int) -> None:
        self.fleet.scale(num)
        wait_until(lambda: self.versions().keys() >= {f"worker-{i}" for i in range(num)})

    def versions(self) -> dict[str, int]:
        """Slot -> version, of the ready workers."""
        ready = [status for status in self.fleet.statuses() if status.state == "ready"]
        return {status.worker_id.partition(".")[0]: status.policy_version for status in ready}

    def send(self, version: int) -> bool:
        tensors = weights(version)
        self.sender.begin(version, CANARY, tensors, torch.bfloat16)
        for tensor in tensors.values():
            self.sender.add(tensor.bfloat16() if tensor.is_floating_point() else tensor)
        self.sender.end()
        return self.sender.finish()

    def announce(self, version: int) -> None:
        """The file of the version follows."""
        self.client.update_weights(make_update(self.folder / f"version-{version}", version), timeout_s=30)

    def stop(self) -> None:
        self.fleet.stop()
        self.server.stop()
        for thread in threading.enumerate():
            if thread.name == "transfer":
                thread.join(10)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    for name in ("POLL_S", "WATCH_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(f"rollout_server.fleet.fleet.{name}", 0.01)
    made = Rig(tmp_path)
    yield made
    made.stop()


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.monotonic()
    return work(), time.monotonic() - began


def test_every_worker_gets_every_bit_and_the_communicator_is_kept(rig: Rig) -> None:
    rig.scale(2)
    for version in (1, 2, 3):
        assert rig.send(version)
        assert rig.versions() == {"worker-0": version, "worker-1": version}
        for receiver in rig.receivers:
            assert receiver.tensors.keys() == weights(version).keys()
            for name, tensor in weights(version).items():
                sent = tensor.bfloat16() if tensor.is_floating_point() else tensor
                assert torch.equal(receiver.tensors[name], sent)
    assert [receiver.num_joined for receiver in rig.receivers] == [1, 1]
    rig.scale(3)
    rig.announce(3)
    assert rig.send(4)
    assert rig.versions() == {f"worker-{i}": 4 for i in range(3)}
    assert len(rig.ids) == 2, "another worker needs another communicator"


@pytest.mark.parametrize("phase", PHASES)
def test_a_receiver_that_dies_costs_one_deadline_at_most_and_all_get_the_version(rig: Rig, phase: str) -> None:
    rig.scale(2)
    rig.announce(1)
    killed = threading.Event()

    def die(worker_id: str, now: str) -> None:
        if (worker_id, now) == ("worker-0", phase):
            killed.set()
            raise WorkerDiedError("its process is gone")

    rig.at = die
    done, seconds = timed(lambda: rig.send(2))
    assert killed.is_set()
    assert not done
    assert seconds < LIMIT_S + SLACK_S
    rig.announce(2)
    wait_until(lambda: rig.versions() == {"worker-0": 2, "worker-1": 2})
    rig.at = lambda worker_id, now: None
    assert rig.send(3)
    assert rig.versions() == {"worker-0": 3, "worker-1": 3}
    assert rig.fatal == []


@pytest.mark.parametrize("phase", PHASES)
def test_a_sender_that_dies_leaves_workers_with_one_version(rig: Rig, phase: str) -> None:
    """In `start` it has joined and sends nothing; in `update` it has sent a part."""

    def never(unique_id: bytes, world_size: int) -> GlooGroup:
        gone.wait()
        raise RuntimeError("gone")

    rig.scale(2)
    rig.announce(1)
    sender, gone = rig.sender, threading.Event()
    tensors = [tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in weights(2).values()]
    if phase == "init":
        sender._join = never
    sender.begin(2, CANARY, weights(2), torch.bfloat16)
    for tensor in {"init": [], "start": [], "update": tensors[:4], "finish": tensors}[phase]:
        sender.add(tensor)
    if phase == "finish":
        sender.end()
    # Nobody calls the sender again. The next learner continues from its checkpoint.
    want = 2 if phase == "finish" else 1
    began = time.monotonic()
    wait_until(lambda: sender._call is not None and sender._call.done())
    wait_until(lambda: rig.versions() == {"worker-0": want, "worker-1": want})
    assert time.monotonic() - began < LIMIT_S + SLACK_S
    gone.set()
    sender._leave()
    rig.client.update_weights(make_update(rig.folder / "again", 1), timeout_s=30, rollback=True)
    assert rig.versions() == {"worker-0": 1, "worker-1": 1}


@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_that_joins_during_a_transfer_starts_with_the_file_before_and_gets_the_next(
    rig: Rig, phase: str
) -> None:
    rig.scale(1)
    rig.announce(1)

    def grow(worker_id: str, now: str) -> None:
        if now == phase:
            rig.fleet.scale(2)
            wait_until(lambda: len(rig.receivers) == 2 and "start" in rig.receivers[1].events)

    rig.at = grow
    assert rig.send(2)
    rig.at = lambda worker_id, now: None
    wait_until(lambda: rig.versions() == {"worker-0": 2, "worker-1": 1})
    rig.announce(2)
    assert rig.versions() == {"worker-0": 2, "worker-1": 2}
    assert rig.receivers[1].events == ["start", "update 1", "begin 1", "update 2"]


def test_workers_that_have_changed_meanwhile_are_found_before_anybody_waits(rig: Rig) -> None:
    rig.scale(1)
    transfer = WeightTransfer(
        version=2, canary=CANARY, backend="nccl", workers={"worker-7": 1}, init_info={}, update_info={}
    )
    with pytest.raises(ContractError):
        rig.client.transfer_weights(transfer, timeout_s=LIMIT_S)
    assert rig.receivers[0].events == ["start", "begin None"]
    assert asdict(transfer)["canary"] == asdict(CANARY)


def test_after_failures_in_a_row_weights_travel_as_files_only(rig: Rig) -> None:
    rig.scale(1)

    def refuse(unique_id: bytes, world_size: int) -> GlooGroup:
        raise RuntimeError("NCCL: unhandled system error")

    rig.sender._join = refuse
    results = [timed(lambda version=version: rig.send(version)) for version in range(2, 4 + MAX_FAILURES)]
    assert not any(done for done, _ in results)
    assert len(rig.ids) <= MAX_FAILURES
    assert results[-1][1] < 0.1


@pytest.mark.parametrize(
    ("wanted", "device", "options", "num_ranks", "got"),
    [
        ("auto", "cpu", {}, 1, "file"),
        ("auto", "cuda", {}, 2, "nccl"),
        ("auto", "cuda", {"gpu_memory_utilization": 0.4}, 1, "ipc"),
        ("auto", "cuda", {"gpu_memory_utilization": 0.4}, 2, "file"),
        ("file", "cuda", {}, 1, "file"),
        ("nccl", "cuda", {"gpu_memory_utilization": 0.4}, 1, "nccl"),
    ],
)
def test_auto_is_what_the_gpus_allow(
    wanted: str, device: str, options: dict[str, Any], num_ranks: int, got: str
) -> None:
    config = learner_config(
        rollout={"weight_transfer": wanted, "engine_options": options}, learner={"num_ranks": num_ranks}
    )
    assert backend_of(config, torch.device(device)) == got


def test_a_learner_without_a_gpu_sends_files(rig: Rig) -> None:
    assert make_sender(learner_config(), rig.client, CPU) is None
    with pytest.raises(ConfigError, match="GPU"):
        make_sender(learner_config(rollout={"weight_transfer": "nccl"}), rig.client, CPU)
