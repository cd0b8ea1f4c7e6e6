"""The probe of an engine's kernels tells the weights that arrived from those before, down to steps of 1e-6."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollout_server.engines._kernel_probe import KernelProbe, Linear, product, vectors

CPU = torch.device("cpu")
SHAPES = {f"layers.{i}.{name}.weight": shape for i in range(4) for name, shape in (("q", (96, 96)), ("up", (256, 96)))}


class Engine:
    """Layers that multiply in the model's dtype with what was loaded; q and up of a layer are fused."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.dtype = dtype
        rng = torch.Generator().manual_seed(seed)
        self.master = {name: 0.02 * torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}
        self.loaded = self.sent()
        self.probe = KernelProbe(dtype, CPU)

    def sent(self) -> dict[str, Tensor]:
        return {name: weight.to(self.dtype, copy=True) for name, weight in self.master.items()}

    def step(self, size: float, seed: int) -> None:
        """Every element of the learner's float32 weights moves by `size`."""
        rng = torch.Generator().manual_seed(seed)
        for weight in self.master.values():
            weight += size * torch.randn(weight.shape, generator=rng).sign()

    def update(self, *, keeps: str = "none") -> str:
        """Load what the learner sends, except layers whose name contains `keeps`. Returns: what the probe says."""
        self.probe.begin()
        for name, weight in self.probe.noted(self.sent().items()):
            if keeps not in name:
                self.loaded[name] = weight
        return self.probe.problem(self.layers())

    def layers(self) -> list[Linear]:
        return [self.fused(f"layers.{i}.q.weight", f"layers.{i}.up.weight") for i in range(4)]

    def fused(self, *names: str) -> Linear:
        def kernel(x: Tensor) -> Tensor:
            padding = torch.full((len(x), 3), 7.0, dtype=self.dtype)
            return torch.cat([*[x @ self.loaded[name].T for name in names], padding], dim=1)

        return Linear(names=names, sizes=tuple(SHAPES[name][0] for name in names), num_inputs=96, kernel=kernel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e-3, 1e-4, 1e-5, 1e-6])
def test_an_engine_that_kept_its_weights_is_told_from_one_that_took_the_new_ones(
    dtype: torch.dtype, size: float
) -> None:
    for seed in range(5):
        engine = Engine(dtype, seed)
        assert engine.update() == ""
        for number in range(3):
            engine.step(size, seed=100 * seed + number)
            assert engine.update() == "", "the new weights are the new ones"
        engine.step(size, seed=100 * seed + 50)
        assert engine.update(keeps="layers") != "", "all were kept"


@pytest.mark.parametrize("size", [1e-3, 1e-4, 1e-5])
def test_one_layer_of_many_that_kept_its_weights_is_named(size: float) -> None:
    engine = Engine(torch.bfloat16)
    engine.update()
    engine.step(size, seed=1)
    assert "layers.2.up.weight" in engine.update(keeps="layers.2.up")


def test_other_weights_than_those_that_arrived_are_noticed_at_the_first_update() -> None:
    engine, other = Engine(torch.bfloat16), Engine(torch.bfloat16, seed=9)
    engine.master = other.master
    assert "layers.0.q.weight" in engine.update(keeps="layers.0.q")


def test_a_model_without_a_layer_that_can_be_asked_is_undecided() -> None:
    """Quantized, or over several GPUs."""
    engine = Engine(torch.bfloat16)
    engine.update()
    assert engine.probe.problem([]) == ""
    assert not engine.probe.decides


def test_the_same_weights_again_say_nothing_and_a_weight_that_is_no_number_is_a_problem() -> None:
    engine = Engine(torch.bfloat16)
    assert engine.update() == ""
    assert engine.update(keeps="layers") == ""
    engine.loaded["layers.1.q.weight"] = engine.loaded["layers.1.q.weight"] * float("nan")
    assert "layers.1.q.weight" in engine.update(keeps="layers.1.q")


def test_the_vectors_are_signs_and_a_matrix_with_few_outputs_has_more_of_them() -> None:
    x = vectors(3, 128, CPU)
    assert x.abs().tolist() == [[1.0] * 3] * 128
    assert torch.equal(x[:4], vectors(3, 4, CPU))
    a, b, c = x[0].tolist()
    found = product(torch.tensor([[1.0, 2.0, 4.0], [0.5, 0.0, -1.0]]))
    assert found[0].tolist() == [a + 2 * b + 4 * c, 0.5 * a - c]
    outputs = (2, 64, 1024, 4096)
    assert [len(product(torch.zeros(num, 3))) for num in outputs] == [128, 64, 4, 4]
