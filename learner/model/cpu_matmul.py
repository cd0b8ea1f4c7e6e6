"""Matrix products on CPUs through oneDNN instead of MKL.

PyTorch multiplies float32 matrices with MKL, which uses its AVX2 path on AMD processors: 110 GFLOP/s on one Zen 5
core, where oneDNN's AVX-512 kernels reach 245 (forward, input gradient) and 175 (weight gradient). Matrix products are
two thirds of a step of a small model, so this saves a quarter of it. oneDNN is part of PyTorch, but only its compiler
uses it for float32; this file calls the same operator. If it is missing, or on another device or dtype, PyTorch's
product is used. Sums are in float32 either way: results differ only by rounding.

Suffixes: N rows, I input features, O output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_OPERATOR = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def product(left_NK: Tensor, right_MK: Tensor) -> Tensor:
    """left @ right^T, [N, M]; any strides, no gradient."""
    if _OPERATOR is None or left_NK.device.type != "cpu" or left_NK.dtype != torch.float32 or not len(left_NK):
        return left_NK @ right_MK.T
    result: Tensor = _OPERATOR(left_NK, right_MK, None, "none", [], "")
    return result


class OneDnnLinear(nn.Linear):
    """nn.Linear whose three products use `product`, with the same parameters."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        if self.bias is not None or input.dtype != torch.float32 or torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        rows_NI = input.reshape(-1, input.shape[-1])
        output: Tensor = _Product.apply(rows_NI, self.weight)
        return output.view(*input.shape[:-1], -1)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(rows_NI, weight_OI)
        return product(rows_NI, weight_OI)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows_NI, weight_OI = ctx.saved_tensors
        grad_rows_NI = product(grad_NO, weight_OI.T) if ctx.needs_input_grad[0] else None
        grad_weight_OI = product(grad_NO.T, rows_NI.T) if ctx.needs_input_grad[1] else None
        return grad_rows_NI, grad_weight_OI


def use_onednn(model: nn.Module) -> None:
    """Replace every plain linear layer of a model on the CPU, in place."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu":
            module.__class__ = OneDnnLinear
