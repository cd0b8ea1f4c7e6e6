"""vLLM's own NCCL weight transfer engine on CPU, with gloo as its process group, against transformers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config, ModelConfig
from bapo.core.types import Canary, WeightTransfer
from learner.model.file_format import converts_singly, file_shapes, file_tensors
from learner.transfer_weights import NcclSender, in_order
from rollout_server.engines import vllm
from rollout_server.rollouts.base import completion_of
from rollout_server.weights.canary import Agreement
from rollout_server.weights.receive import load_verified
from tests.support.factories import make_request
from tests.support.gloo_transfer import CpuTorch, GlooGroup
from tests.support.tiny_experts import write_tiny_experts
from tests.support.tiny_model import perturb, reference_logprobs, write_tiny_model

TOKENS = (16, 103, 11, 214, 84, 209, 20, 30, 40)
TOLERANCE = 1e-4
LIMIT_S = 60.0


class OneWorker:
    """The fleet of one engine, in this process; one thread owns it, as in a worker."""

    def __init__(self, config: Config) -> None:
        self.config, self._owner = config, ThreadPoolExecutor(1)
        self._owner.submit(torch.set_num_threads, 1)
        self.engine: vllm.VllmEngine = self._owner.submit(vllm.make_engine, config).result()

    def call(self, work: Callable[[], Any]) -> Any:
        return self._owner.submit(work).result()

    def workers(self) -> list[Any]:
        return [SimpleNamespace(worker_id="worker-0", state="ready")]

    def transfer_weights(self, transfer: WeightTransfer, *, timeout_s: float) -> dict[str, float]:
        init_info = {**transfer.init_info, "rank_offset": transfer.workers["worker-0"]}
        self.call(lambda: self.engine.join_transfer(transfer.backend, init_info))
        self.call(lambda: load_verified(self.engine, transfer, Agreement()))
        return {"worker-0": 0.0}


@pytest.fixture(params=["tied", "untied", "experts"])
def worker_and_model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[OneWorker, Any]]:
    if request.param == "experts":
        model: Any = write_tiny_experts(tmp_path / "model")
    else:
        model = write_tiny_model(tmp_path / "model", tie=request.param == "tied")
    config = Config(model=ModelConfig(path=str(tmp_path / "model")), rollout=RolloutConfig(max_prompt_tokens=128))
    os.environ.update(vllm.ENVIRONMENT)
    worker = OneWorker(config)
    yield worker, model
    worker.call(worker.engine.close)


def test_an_engine_has_the_weights_that_were_sent_twice_over_one_communicator(
    worker_and_model: tuple[OneWorker, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

    worker, model = worker_and_model
    store, joined = HashStore(), []

    def join_as_worker(info: Any, parallel: Any) -> GlooGroup:
        joined.append(info.world_size)
        return GlooGroup(store, info.nccl_unique_id_bytes, parallel.rank + info.rank_offset, info.world_size, LIMIT_S)

    monkeypatch.setattr(nccl_engine, "worker_init_process_group", join_as_worker)
    monkeypatch.setattr(packed_tensor, "torch", CpuTorch())
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    sender = NcclSender(
        worker,  # type: ignore[arg-type]
        timeout_s=LIMIT_S,
        join=lambda unique_id, world_size: GlooGroup(store, unique_id, 0, world_size, LIMIT_S),
        make_id=lambda: bytes(128),
        buffer_bytes=20_000,
    )
    request = make_request(prompt_id="in flight")
    prompt = vllm.make_tokenization(worker.config).encode_prompt(request.prompt)
    worker.call(lambda: worker.engine.add(completion_of(request, prompt, worker.config)))
    assert converts_singly(model)
    for version in (2, 3):
        perturb(model, seed=version)
        logprobs = tuple(reference_logprobs(model, list(TOKENS)).tolist())
        tensors = in_order(dict(model.named_parameters()), torch.float32)
        canary = Canary(token_ids=TOKENS, logprobs=logprobs, tolerance=TOLERANCE)
        sender.begin(version, canary, file_shapes(model, tensors), torch.float32)
        for name, tensor in tensors.items():
            for each in file_tensors(model, {name: tensor.detach()}).values():
                sender.add(each)
        sender.end()
        assert sender.finish()
        assert worker.engine.policy_version == version
    assert joined == [2], "the second update uses the communicator of the first"


def test_without_nccl_the_engine_declines_and_keeps_its_weights(
    worker_and_model: tuple[OneWorker, Any],
) -> None:
    worker, _ = worker_and_model
    before = worker.call(lambda: worker.engine.logprobs(TOKENS))
    info = {"nccl_unique_id_b64": "A" * 170 + "A=", "world_size": 2, "packed": True, "rank_offset": 1}
    with pytest.raises(Exception, match=r"."):
        worker.call(lambda: worker.engine.join_transfer("nccl", info))
    after = worker.call(lambda: worker.engine.logprobs(TOKENS))
    assert before is not None
    assert after is not None
    assert before.tolist() == after.tolist()
