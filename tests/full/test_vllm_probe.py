"""A vLLM in bfloat16 that keeps old weights is noticed after steps that its log-probs do not show."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config, ModelConfig
from bapo.core.errors import WeightMismatchError
from rollout_server.engines import vllm
from rollout_server.engines._kernel_probe import KernelProbe
from tests.support.tiny_model import write_tiny_model

Weights = dict[str, torch.Tensor]


class Learner:
    """Float32 weights that move by a step of one size, and the files of their versions in bfloat16."""

    def __init__(self, folder: Path, tie: bool) -> None:
        self.folder = folder
        self.version = 1
        model: Any = write_tiny_model(folder / "model", tie=tie)
        self.master = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    def step(self, size: float) -> None:
        self.version += 1
        rng = torch.Generator().manual_seed(self.version)
        for weight in self.master.values():
            weight += size * torch.randn(weight.shape, generator=rng).sign()

    def rounded(self) -> Weights:
        return {name: weight.to(torch.bfloat16) for name, weight in self.master.items()}

    def write(self) -> str:
        path = self.folder / f"{self.version}.safetensors"
        save_file(self.rounded(), path)
        return str(path)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Learner]]:
    learner = Learner(tmp_path_factory.mktemp("probe"), tie=request.param)
    config = Config(
        model=ModelConfig(path=str(learner.folder / "model"), dtype="bfloat16"),
        rollout=RolloutConfig(max_groups_in_flight=2, max_prompt_tokens=64, max_response_tokens=32),
    )
    os.environ.update(vllm.ENVIRONMENT)
    engine = vllm.make_engine(config)
    yield engine, learner
    engine.close()


def loads_instead(monkeypatch: pytest.MonkeyPatch, old: Weights, part: str) -> None:
    """What arrives is noted, and of the tensors whose name contains `part` the old values are loaded."""
    noted = KernelProbe.noted

    def wrong(self: KernelProbe, weights: Iterable[tuple[str, torch.Tensor]], *rename: Any) -> Iterator[Any]:
        for name, tensor in noted(self, weights, *rename):
            yield name, old[name] if part in name else tensor

    monkeypatch.setattr(KernelProbe, "noted", wrong)


@pytest.mark.parametrize("size", [1e-3, 1e-4, 1e-5, 1e-6])
def test_old_weights_are_noticed_and_new_ones_are_not(
    pair: tuple[Any, Learner], size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, learner = pair
    for _ in range(3):
        engine.load_weights(learner.write(), learner.version)
        learner.step(size)
    parts = ["weight"] if size < 1e-4 else ["weight", "layers.1.mlp.up_proj", "layers.0.self_attn.k_proj"]
    for part in parts:
        engine.load_weights(learner.write(), learner.version)
        old = learner.rounded()
        learner.step(size)
        with monkeypatch.context() as fault:
            loads_instead(fault, old, part)
            with pytest.raises(WeightMismatchError):
                engine.load_weights(learner.write(), learner.version)
        # An engine that failed is replaced; this one takes the same weights again, which says nothing of the step.
        engine.load_weights(learner.write(), learner.version)


def test_every_matrix_of_the_model_is_probed_the_head_too(pair: tuple[Any, Learner]) -> None:
    engine, learner = pair
    engine.load_weights(learner.write(), learner.version)

    def names(worker: Any) -> list[str]:
        from rollout_server.engines._vllm_receiver import _layers

        return [name for layer in _layers(worker.model_runner.get_model(), worker.kernel_probe) for name in layer.names]

    (found,) = engine._engine.collective_rpc(names)
    matrices = {name for name, weight in learner.master.items() if weight.ndim == 2}
    lookup = set() if "lm_head.weight" not in matrices else {"model.embed_tokens.weight"}
    assert set(found) == matrices - lookup
