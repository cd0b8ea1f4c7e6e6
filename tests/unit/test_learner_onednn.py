"""oneDNN's products are PyTorch's, with gradients; everything else about a linear layer stays as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from learner.model import cpu_matmul as onednn
from learner.model.cpu_matmul import OneDnnLinear, product, use_onednn


def example(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_products_of_strided_matrices_are_exact_to_rounding() -> None:
    left, right = example(37, 20), example(11, 20, seed=1)
    torch.testing.assert_close(product(left, right), left @ right.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(product(left.T, example(9, 37, seed=2)), left.T @ example(9, 37, seed=2).T)
    assert product(left[:0], right).shape == (0, 11)


def test_a_layer_gives_the_same_output_and_gradients() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 24, bias=False), nn.SiLU(), nn.Linear(24, 8, bias=False))
    fast = copy.deepcopy(plain)
    use_onednn(fast)
    assert [type(layer) for layer in fast] == [OneDnnLinear, nn.SiLU, OneDnnLinear]
    inputs = [example(2, 5, 16).requires_grad_() for _ in range(2)]
    outputs = [model(rows) for model, rows in zip((plain, fast), inputs, strict=True)]
    torch.testing.assert_close(outputs[1], outputs[0])
    for output in outputs:
        (output**2).sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    for a, b in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_layers_that_are_not_plain_and_other_dtypes_go_pytorchs_way() -> None:
    biased = nn.Linear(6, 4)
    use_onednn(biased)
    rows = example(3, 6)
    torch.testing.assert_close(biased(rows), rows @ biased.weight.T + biased.bias)
    double = nn.Linear(6, 4, bias=False).double()
    use_onednn(double)
    assert double(rows.double()).dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer = nn.Linear(6, 4, bias=False)
        use_onednn(layer)
        assert layer(rows).dtype == torch.bfloat16


def test_without_onednn_the_product_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = example(5, 3), example(4, 3, seed=1)
    monkeypatch.setattr(onednn, "_OPERATOR", None)
    assert torch.equal(product(left, right), left @ right.T)


def test_a_frozen_layer_passes_the_gradient_on_and_takes_none() -> None:
    layer = nn.Linear(6, 4, bias=False).requires_grad_(False)
    use_onednn(layer)
    rows = example(3, 6).requires_grad_()
    layer(rows).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(rows.grad, layer.weight.sum(0).expand(3, 6))
