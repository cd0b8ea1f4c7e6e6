"""GPU time by events, and useful FLOPs by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from learner.batch.columns import columns_of
from learner.diagnostics.step_report import Stopwatch
from learner.diagnostics.utilization import UNKNOWN, ModelFlops, model_flops, peak_tflops, utilization
from learner.distributed.world import World
from learner.model.policy import load_policy
from tests.support.factories import make_batch, make_group
from tests.support.learner import ALONE, learner_config
from tests.support.tiny_model import VOCAB_SIZE
from tests.support.tiny_vision import write_tiny_vision


class FakeGpu:
    """A clock that only work advances; events are marks of its queue."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def event(self) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.at_ms: float | None = None
        self.is_awaited = False

    def record(self) -> None:
        self.at_ms = self._gpu.now_ms

    def synchronize(self) -> None:
        self.is_awaited = True

    def elapsed_time(self, end: FakeEvent, /) -> float:
        assert end.is_awaited, "an event that the GPU has not reached has no time"
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms


def test_a_phase_takes_the_time_of_its_own_work_on_the_gpu() -> None:
    gpu = FakeGpu()
    watch = Stopwatch(gpu.event)
    for name, work_ms in (("prox", 500.0), ("update", 2000.0), ("prox", 250.0)):
        with watch.phase(name):
            gpu.now_ms += work_ms
        gpu.now_ms += 1000.0  # between phases
    assert watch.gpu_seconds == {"prox": 0.75, "update": 2.0}
    assert watch.seconds["update"] < 1.0, "the host only queued it"


def test_without_a_gpu_there_is_no_gpu_time() -> None:
    watch = Stopwatch()
    with watch.phase("prox"):
        pass
    assert watch.gpu_seconds == {}
    assert set(UNKNOWN.fields) == {"prox_gpu_s", "update_gpu_s", "tflops_per_s", "mfu", "mfu_update"}
    assert set(UNKNOWN.fields.values()) == {None}


def test_flops_count_a_prompt_once_per_group_and_every_position_that_is_attended_to() -> None:
    batch = make_batch(groups=[make_group(rewards="10", lengths=[3, 2], num_prompt_tokens=4)])
    columns = columns_of(batch, learner_config(algorithm={"batch_size": 8, "group_size": 2}))
    both, first = np.array([0, 1]), np.array([0])
    # Tokens: 4 of the prompt, 2 and 1 of the responses, whose last ones predict nothing.
    assert ModelFlops(per_token=1, per_attended=0, per_prediction=0).of(columns, both) == 7
    assert ModelFlops(per_token=1, per_attended=0, per_prediction=0).of(columns, first) == 6
    # Positions: 1 + 2 + 3 + 4 by the prompt, 5 + 6 and 5 by the responses.
    assert ModelFlops(per_token=0, per_attended=1, per_prediction=0).of(columns, both) == 26
    assert ModelFlops(per_token=0, per_attended=0, per_prediction=1).of(columns, both) == 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flops_of_a_model_come_from_its_weights_whether_sharded_or_not(dtype: str, model_path: Path) -> None:
    policy = load_policy(model_path, learner_config(model_path, model={"dtype": dtype}), ALONE)
    settings, found = policy.model.config, model_flops(policy)
    matrices = [p for layer in policy.model.model.layers for p in layer.parameters() if p.ndim == 2]
    assert len(matrices) == 7 * settings.num_hidden_layers, "q, k, v, o, gate, up, down"
    assert found.per_token == 6 * sum(p.numel() for p in matrices)
    assert found.per_attended == 12 * settings.num_hidden_layers * settings.hidden_size
    assert found.per_prediction == 6 * settings.hidden_size * VOCAB_SIZE


def test_a_frozen_weight_has_no_flops_of_its_gradient(model_path: Path) -> None:
    lora = {"rank": 4, "targets": ["q_proj"]}
    policy = load_policy(model_path, learner_config(model_path, model={"lora": lora}), ALONE)
    found = model_flops(policy)
    # Two layers: q, o of 64 x 64, k, v of 64 x 32, three of 64 x 128; A of 4 x 64 and B of 64 x 4.
    assert found.per_token == 2 * (4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 6 * 2 * 4 * 64)
    assert found.per_prediction == 4 * 64 * VOCAB_SIZE


def test_a_rate_is_per_rank_and_by_the_gpus_clock_where_there_is_one() -> None:
    seconds, gpu_seconds = {"prox": 0.5, "update": 1.5, "diagnostics": 9.0}, {"prox": 1.0, "update": 3.0}
    assert utilization(8e12, seconds, {}, ALONE).tflops_per_s == 4.0
    found = utilization(8e12, seconds, gpu_seconds, ALONE)
    assert (found.tflops_per_s, found.mfu) == (2.0, None)
    assert found.fields["update_gpu_s"] == 3.0
    assert utilization(0.0, seconds, {}, ALONE).tflops_per_s is None


def test_the_update_alone_has_a_utilization_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    world = World(rank=0, size=2, device=torch.device("cuda"))
    found = utilization(2 * 989e12, {}, {"prox": 1.0, "update": 4.0}, world)
    assert (found.mfu, found.mfu_update) == (pytest.approx(0.2), pytest.approx(0.25))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989), ("NVIDIA H20", 148), ("NVIDIA GeForce RTX 4090", 165), ("Tesla T4", None),
    ],
)  # fmt: skip
def test_the_peak_of_a_gpu_is_found_by_its_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


def test_a_vision_tower_does_not_count(tmp_path: Path) -> None:
    layers = write_tiny_vision(tmp_path).model.language_model.layers
    found = model_flops(load_policy(tmp_path, learner_config(tmp_path), ALONE))
    assert found.per_token == 6 * sum(p.numel() for p in layers.parameters() if p.ndim == 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: torch finds no CUDA device here")
def test_events_of_cuda_are_events() -> None:
    from learner.diagnostics.utilization import gpu_events

    watch = Stopwatch(gpu_events(torch.device("cuda")))
    with watch.phase("update"):
        torch.ones(1024, 1024, device="cuda") @ torch.ones(1024, 1024, device="cuda")
    assert 0 < watch.gpu_seconds["update"] < 60
