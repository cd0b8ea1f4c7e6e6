"""Weight transfers with gloo in NCCL's place: the learner's group, and receivers with vLLM's own unpacking."""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed

from bapo.core.types import WeightTransfer
from learner.transfer_weights import in_daemon_thread
from tests.support.fake_worker import FakeHandle

PHASES = ("init", "start", "update", "finish")


class GlooGroup:
    """One rank of a communicator by a unique id; the store is shared by the threads of this process."""

    def __init__(self, store: Any, unique_id: bytes, rank: int, world_size: int, timeout_s: float = 2.5) -> None:
        own = distributed.PrefixStore(unique_id.hex(), store)
        self._group = distributed.ProcessGroupGloo(own, rank, world_size, timedelta(seconds=timeout_s))

    def broadcast(self, packed: Tensor, src: int = 0, stream: Any = None) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([packed], options).wait()

    def abort(self) -> None:
        return

    destroy = abort


class CpuTorch:
    """torch, with streams that do nothing."""

    cuda = SimpleNamespace(
        stream=lambda stream: nullcontext(), Stream=lambda device: SimpleNamespace(synchronize=lambda: None)
    )
    accelerator = SimpleNamespace(current_device_index=lambda: 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def vllm_unpacking() -> ModuleType:
    """vLLM's packed_tensor.py alone: importing vLLM takes 15 s."""
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.submodule_search_locations
    path = f"{vllm.submodule_search_locations[0]}/distributed/weight_transfer/packed_tensor.py"
    spec = importlib.util.spec_from_file_location("packed_tensor_alone", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.torch = CpuTorch()  # type: ignore[attr-defined]
    return module


class Receiver(FakeHandle):
    """A worker whose engine goes through the four phases in a thread. `at` is called at the start of each."""

    def __init__(self, worker_id: str, store: Any, at: Callable[[str, str], None]) -> None:
        super().__init__(worker_id)
        self._store, self._at = store, at
        self._joined: tuple[str, GlooGroup] | None = None
        self.tensors: dict[str, Tensor] = {}
        self.num_joined = 0

    def transfer_weights(self, transfer: WeightTransfer, timeout_s: float) -> float | None:
        self.events.append(f"transfer {transfer.version}")
        return in_daemon_thread(lambda: self._receive(transfer)).result(timeout_s)

    def _receive(self, transfer: WeightTransfer) -> float:
        info, update = transfer.init_info, transfer.update_info
        self._at(self.worker_id, "init")
        unique_id = str(info["nccl_unique_id_b64"])
        if self._joined is None or self._joined[0] != unique_id:
            rank = transfer.workers[self.worker_id]
            group = GlooGroup(self._store, base64.b64decode(unique_id), rank, info["world_size"])
            self._joined = (unique_id, group)
            self.num_joined += 1
        for phase in ("start", "update"):
            self._at(self.worker_id, phase)
        rows = zip(update["names"], update["shapes"], update["dtype_names"], strict=True)
        received: dict[str, Tensor] = {}
        vllm_unpacking().packed_nccl_broadcast_consumer(
            iterator=((name, (shape, getattr(torch, dtype))) for name, shape, dtype in rows),
            group=self._joined[1],
            src=0,
            post_unpack_func=lambda pairs: received.update((name, tensor.clone()) for name, tensor in pairs),
            buffer_size_bytes=info["packed_buffer_size_bytes"],
            num_buffers=info["packed_num_buffers"],
            device="cpu",
        )
        self._at(self.worker_id, "finish")
        self.tensors, self.version = received, transfer.version
        return 0.25
